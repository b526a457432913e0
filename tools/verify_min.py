#!/usr/bin/env python3
"""A second, tiny verifier of a Tare task: chain, recorded files, generated pages, signatures.

Written from docs/formats/ alone, with the standard library only, and sharing no code with
`tare verify`; a test runs both on every tamper case. Usage: verify_min.py DIR [CHECKPOINT]
Exit status: 0 pass, 1 fail, 2 inconclusive (a torn last line), 64 usage.
"""
import base64, functools, hashlib, json, os, re, stat, sys

EVENT = re.compile(
    rb'\{"seq":(0|[1-9][0-9]*),"time":"[^"]{30}","run_id":"[^"]{36}","type":"[a-z-]{1,64}","actor":"[^"\\]+"'
    rb',"data":\{.*\},"prev":"([0-9a-f]{64})","self":"([0-9a-f]{64})"\}', re.DOTALL)
FOOTER = re.compile(rb"(.*)\n<!-- generated events=([1-9][0-9]*) head=([0-9a-f]{64}) sha256=([0-9a-f]{64}) -->\n",
                    re.DOTALL)

def sha(data):
    return hashlib.sha256(data).hexdigest()

# Ed25519 verification (RFC 8032), extended coordinates, cofactorless.
P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P

def decode_point(data):
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (1 << 255) - 1
    if y >= P:
        return None
    u, v = (y * y - 1) % P, (D * y * y + 1) % P
    x = u * pow(v, 3, P) * pow(u * pow(v, 7, P), (P - 5) // 8, P) % P
    if v * x * x % P == P - u % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if v * x * x % P != u or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = P - x
    return (x, y, 1, x * y % P)

def add(p, q):
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % P, (p[1] + p[0]) * (q[1] + q[0]) % P
    c, d = 2 * p[3] * q[3] * D % P, 2 * p[2] * q[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return (e * f % P, g * h % P, f * g % P, e * h % P)

def multiply(n, p):
    q = (0, 1, 1, 0)
    while n:
        if n & 1:
            q = add(q, p)
        p, n = add(p, p), n >> 1
    return q

BASE = decode_point((4 * pow(5, P - 2, P) % P).to_bytes(32, "little"))

@functools.lru_cache(maxsize=64)
def ed25519(key, message, signature):
    a, s = decode_point(key), int.from_bytes(signature[32:], "little")
    if a is None or s >= L:
        return False
    h = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % L
    q = add(multiply(s, BASE), multiply(L - h, a))  # [s]B - [h]A
    z = pow(q[2], P - 2, P)
    x, y = q[0] * z % P, q[1] * z % P
    return (y | (x & 1) << 255).to_bytes(32, "little") == signature[:32]

def wire(data):
    return len(data).to_bytes(4, "big") + data

def take(data):
    n = int.from_bytes(data[:4], "big")
    if len(data) < 4 + n:
        raise ValueError("cut short")
    return data[4:4 + n], data[4 + n:]

def key_bytes(text):
    if text.startswith("ed25519:"):
        return bytes.fromhex(text[8:])
    return take(take(base64.b64decode(text.split(" ")[1]))[1])[0]

def fingerprint(key):
    blob = wire(b"ssh-ed25519") + wire(key)
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")

def signature_holds(key, message, text):
    begin, end = b"-----BEGIN SSH SIGNATURE-----\n", b"-----END SSH SIGNATURE-----\n"
    if text.startswith(begin) and text.endswith(end):
        blob = base64.b64decode(text[len(begin):-len(end)].replace(b"\n", b""), validate=True)
        if blob[:10] != b"SSHSIG\0\0\0\1":
            return False
        signer, rest = take(blob[10:])
        space, rest = take(rest)
        reserved, rest = take(rest)
        algorithm, rest = take(rest)
        inner, rest = take(rest)
        raw = take(take(inner)[1])[0]
        if signer != wire(b"ssh-ed25519") + wire(key) or space != b"tare-review" or reserved or rest:
            return False
        if algorithm not in (b"sha256", b"sha512"):
            return False
        digest = hashlib.new(algorithm.decode(), message).digest()
        return ed25519(key, b"SSHSIG" + wire(space) + wire(b"") + wire(algorithm) + wire(digest), raw)
    body = text[:-1] if text.endswith(b"\n") and len(text) != 64 else text
    raw = body if len(body) == 64 else bytes.fromhex(body.decode()) if len(body) == 128 else base64.b64decode(body)
    return ed25519(key, message, raw)

def verify(root, checkpoint=None):
    """Returns (status, findings): 0 pass, 1 fail, 2 inconclusive."""
    findings, torn = [], False

    def read(path):
        at = root
        for part in path.split("/")[:-1]:
            at = os.path.join(at, part)
            if not stat.S_ISDIR(os.lstat(at).st_mode):
                raise OSError(path + ": a folder on the way is none")
        full = os.path.join(root, path)
        if not stat.S_ISREG(os.lstat(full).st_mode):
            raise OSError(path + ": not a plain file")
        with open(full, "rb") as file:
            return file.read()

    def check(path, digest, size=None):
        try:
            data = read(path)
            if sha(data) != digest or size not in (None, len(data)):
                findings.append(path + ": changed")
        except OSError as error:
            findings.append(str(error))

    lines, head, events = read("events.jsonl").split(b"\n"), "0" * 64, []
    hashes, tail = [], lines.pop()
    for number, line in enumerate(lines):
        m = EVENT.fullmatch(line)
        if not (m and int(m[1]) == number and m[2].decode() == head and m[3].decode() == sha(line[:-75])):
            torn = number == len(lines) - 1 and not tail and b"\0" in line
            findings += [] if torn else ["line %d: broken" % number]
            break
        head = sha(line)
        hashes.append(head)
        events.append(json.loads(line))
    else:
        torn = bool(tail)
    if not any(e["type"] == "task-created" for e in events):
        findings.append("no event creates the task")
    if checkpoint:
        origin, size, expected = checkpoint.split()
        created = [e["run_id"] for e in events if e["type"] == "task-created"]
        if created[:1] != [origin] or int(size) > len(hashes) or hashes[int(size) - 1] != expected:
            findings.append("checkpoint: another log, or cut back")
    config, keys = None, {}
    for e in events:
        data = e["data"]
        if e["type"] == "artifact":
            check(data["path"], data["sha256"], data["bytes"])
            check(data["path"] + ".intoto.jsonl", data["sidecar"])
        elif e["type"] == "recovered":
            check(data["path"], data["sha256"])
        elif e["type"] == "config":
            config = data
            keys = {fingerprint(key_bytes(r["key"])): (key_bytes(r["key"]), r) for r in data["reviewers"]}
        elif e["type"] == "signoff":
            try:
                statement = read(data["statement"])
                said = json.loads(statement)
                key, reviewer = keys[data["key"]]
                good = (signature_holds(key, statement, read(data["signature"])) and
                        reviewer["person"] == said["person"] == data["person"] and
                        said["bundle"] == data["bundle"] and said["decision"] == data["decision"] and
                        said["step"] == data["step"] and data["step"] in reviewer["steps"])
            except (OSError, ValueError, KeyError, IndexError):
                good = False
            if not good:
                findings.append("event %d: the sign-off does not hold" % e["seq"])
    if config:
        check("task.toml", config["sha256"])
    elif not torn:
        findings.append("no configuration is recorded")
    if os.path.lexists(os.path.join(root, "events.lock")):
        check("events.lock", sha(b""))
    for step in [""] + ["C%d/" % n for n in range(11)] + ["task/"]:
        if os.path.lexists(os.path.join(root, step + "index.md")):
            try:
                m = FOOTER.fullmatch(read(step + "index.md"))
                if not m or sha(m[1]) != m[4].decode() or hashes[int(m[2]) - 1:int(m[2])] != [m[3].decode()]:
                    findings.append(step + "index.md: edited, or of another log")
            except OSError as error:
                findings.append(str(error))
    return (1 if findings else 2 if torn else 0), findings

if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(64)
    kept = open(sys.argv[2], encoding="utf-8").read() if len(sys.argv) == 3 else None
    status, found = verify(sys.argv[1], kept)
    print("\n".join(ascii(line) for line in found))
    print(["pass", "fail", "inconclusive"][status])
    sys.exit(status)
