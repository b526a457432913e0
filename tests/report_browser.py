#!/usr/bin/env python3
"""report_browser.py --tare PROGRAM [--keep DIR]: looks at a task's report in headless Chromium, light and
dark, wide and narrow. Exit 77, which ctest counts as skipped, where there is no Chromium.

What is asked of each picture: it is there, has content (not one colour), its ground is light in light and
dark in dark, and nothing reaches the right edge of a narrow window (a table that runs out of it would).
Standard library only."""
import argparse, os, shutil, struct, subprocess, sys, tempfile, zlib


def pixels(path):
    """(width, height, rows of RGB or RGBA bytes, bytes a pixel) of an 8-bit PNG without interlace."""
    data = open(path, "rb").read()
    assert data[:8] == b"\x89PNG\r\n\x1a\n", path
    at, packed, width, height, depth, kind = 8, b"", 0, 0, 0, 0
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at:at + 8])
        body = data[at + 8:at + 8 + size]
        if name == b"IHDR":
            width, height, depth, kind, _, _, interlace = struct.unpack(">IIBBBBB", body)
            assert depth == 8 and kind in (2, 6) and interlace == 0, (depth, kind, interlace)
        elif name == b"IDAT":
            packed += body
        at += 12 + size
    n = 3 if kind == 2 else 4
    raw, stride, rows, before = zlib.decompress(packed), width * n, [], bytearray(width * n)
    for y in range(height):
        how = raw[y * (stride + 1)]
        line = bytearray(raw[y * (stride + 1) + 1:(y + 1) * (stride + 1)])
        for x in range(stride):
            a, b, c = (line[x - n] if x >= n else 0), before[x], (before[x - n] if x >= n else 0)
            if how == 1:
                line[x] = (line[x] + a) & 255
            elif how == 2:
                line[x] = (line[x] + b) & 255
            elif how == 3:
                line[x] = (line[x] + (a + b) // 2) & 255
            elif how == 4:
                p = a + b - c
                pa, pb, pc = abs(p - a), abs(p - b), abs(p - c)
                line[x] = (line[x] + (a if pa <= pb and pa <= pc else b if pb <= pc else c)) & 255
        rows.append(line)
        before = line
    return width, height, rows, n


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tare", required=True)
    parser.add_argument("--keep", help="leave the pictures there")
    a = parser.parse_args()
    browser = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if browser is None:
        print("no Chromium here: skipped")
        return 77
    with tempfile.TemporaryDirectory(prefix="tare-report-") as folder:
        def tare(*words):
            return subprocess.run([a.tare, *words], cwd=folder, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True)
        for words in (("model", "mini", "mini"), ("init", "task", "--model", "mini"),
                      ("report", "task", "--out", "report")):
            p = tare(*words)
            assert os.path.isdir(os.path.join(folder, words[-1])), (words, p.stdout)
        out = a.keep or folder
        os.makedirs(out, exist_ok=True)
        wrong = 0
        for scheme, value in (("dark", 0), ("light", 1)):
            for shape, width in (("wide", 1280), ("narrow", 400)):
                picture = os.path.join(out, f"report-{scheme}-{shape}.png")
                subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                                f"--user-data-dir={folder}/profile", f"--blink-settings=preferredColorScheme={value}",
                                f"--window-size={width},900", f"--screenshot={picture}",
                                f"file://{folder}/report/report.html"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=True)
                w, h, rows, n = pixels(picture)
                ground = rows[2][:3]
                colours = {bytes(row[x * n:x * n + 3]) for row in rows[::7] for x in range(0, w, 7)}
                edge = sum(1 for row in rows if any(bytes(row[x * n:x * n + 3]) != bytes(ground)
                                                    for x in range(w - 3, w)))
                problems = []
                if w != width or len(colours) < 5:
                    problems.append(f"{w} wide, {len(colours)} colours")
                if (max(ground) < 80) != (scheme == "dark") or (min(ground) > 200) != (scheme == "light"):
                    problems.append(f"the ground is {tuple(ground)} in {scheme}")
                if shape == "narrow" and edge > 0:
                    problems.append(f"{edge} rows reach the right edge")
                wrong += bool(problems)
                print(f"{scheme:5} {shape:6} {w}x{h}: {'; '.join(problems) or 'as it should be'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
