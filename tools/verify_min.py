#!/usr/bin/env python3
"""A second, tiny verifier of a Tare task: chain, recorded files, generated pages, signatures.

Written from docs/formats/ alone, with the standard library only, and sharing no code with
`tare verify`; a test runs both on every tamper case. Usage: verify_min.py DIR [CHECKPOINT]
Exit status: 0 pass, 1 fail, 2 inconclusive (a torn last line), 64 usage. Left to `tare verify`: what
records say of each other, when keys and words are valid, texts of pages, private keys beside the task.
"""
import base64, functools, hashlib, json, os, re, stat, sys

EVENT = re.compile(
    rb'\{"seq":(0|[1-9][0-9]*),"time":"[^"]{30}","run_id":"[^"]{36}","type":"[a-z-]{1,64}","actor":"[^"\\]+"'
    rb',"data":(\{.*\}),"prev":"([0-9a-f]{64})","self":"([0-9a-f]{64})"\}', re.DOTALL)
FOOTER = re.compile(rb"(.*)\n<!-- generated events=([1-9][0-9]*) head=([0-9a-f]{64}) sha256=([0-9a-f]{64}) -->\n",
                    re.DOTALL)

def sha(data):
    return hashlib.sha256(data).hexdigest()
def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

# Ed25519 verification (RFC 8032), extended coordinates, cofactorless.
P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P

def decode_point(data):
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (1 << 255) - 1
    u, v = (y * y - 1) % P, (D * y * y + 1) % P
    x = u * pow(v, 3, P) * pow(u * pow(v, 7, P), (P - 5) // 8, P) % P
    if v * x * x % P == P - u % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    x = x if x & 1 == sign or x == 0 else P - x
    return (x, y, 1, x * y % P) if y < P and v * x * x % P == u and x & 1 == sign else None

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
    x, y = (c * pow(q[2], P - 2, P) % P for c in q[:2])
    return (y | (x & 1) << 255).to_bytes(32, "little") == signature[:32]

def wire(data):
    return len(data).to_bytes(4, "big") + data

def split(data):
    parts = []
    while data:
        n = 4 + int.from_bytes(data[:4], "big")
        if len(data) < n:
            raise ValueError("cut short")
        parts, data = parts + [data[4:n]], data[n:]
    return parts

def key_bytes(text):
    if text.startswith("ed25519:"):
        return bytes.fromhex(text[8:])
    return split(base64.b64decode(text.split(" ")[1]))[1]

def fingerprint(key):
    digest = hashlib.sha256(wire(b"ssh-ed25519") + wire(key)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

def signature_holds(key, message, text):
    begin, end = b"-----BEGIN SSH SIGNATURE-----\n", b"-----END SSH SIGNATURE-----\n"
    if text.startswith(begin) and text.endswith(end):
        blob = base64.b64decode(text[len(begin):-len(end)].replace(b"\n", b""), validate=True)
        signer, space, reserved, algorithm, inner = split(blob[10:])
        kind, raw = split(inner)
        if (blob[:10] != b"SSHSIG\0\0\0\1" or signer != wire(b"ssh-ed25519") + wire(key) or space != b"tare-review" or
                reserved or kind != b"ssh-ed25519" or algorithm not in (b"sha256", b"sha512")):
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
        parts = path.split("/")
        for n in range(1, len(parts) + 1):
            mode = os.lstat(os.path.join(root, *parts[:n])).st_mode
            if not (stat.S_ISREG(mode) if n == len(parts) else stat.S_ISDIR(mode)):
                raise OSError(path + ": not a plain file, or a folder on the way is none")
        with open(os.path.join(root, path), "rb") as file:
            return file.read()

    def hold(holds, what, *given):
        try:
            if holds(what, *given):
                return
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            pass
        findings.append("%s: not what was recorded" % (what if isinstance(what, str) else "event %d" % what["seq"]))

    def is_recorded(path, digest, size=None):
        data = read(path)
        return sha(data) == digest and size in (None, len(data))

    lines, head, events, hashes = read("events.jsonl").split(b"\n"), "0" * 64, [], []
    tail = lines.pop()
    for number, line in enumerate(lines):
        m = EVENT.fullmatch(line)
        if not (m and int(m[1]) == number and m[3].decode() == head and m[4].decode() == sha(line[:-75]) and
                canonical(json.loads(m[2])) == m[2]):
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
        if created[:1] != [origin] or hashes[int(size) - 1:int(size)] != [expected]:
            findings.append("checkpoint: another log, or cut back")
    config, keys, reviews, words = None, {}, [], []

    def is_page(path):
        m = FOOTER.fullmatch(read(path))
        return m and sha(m[1]) == m[4].decode() and hashes[int(m[2]) - 1:int(m[2])] == [m[3].decode()]

    def review_holds(e, data):
        raw, said = read(data["path"]), [r["bundle"] for r in reviews]
        reviews.append(data)
        bundle = json.loads(raw)
        return (sha(raw) == data["bundle"] not in said and bundle["step"] == data["step"] and
                bundle["requester"] == {"person": data["requester"], "keys": data["requester_keys"]} and
                bundle["config"] == config["sha256"] and bundle["dependencies"] == data["dependencies"] and
                [r["run"] for r in bundle["runs"] if r["verdict"] == "pass"] == data["runs"] and
                hashes[:e["seq"]][bundle["head"]["events"] - 1] == bundle["head"]["sha256"])

    def signoff_holds(e, data):
        statement, (key, reviewer) = read(data["statement"]), keys[data["key"]]
        said, asked = json.loads(statement), [r for r in reviews if r["bundle"] == data["bundle"]][0]
        words.append(statement)
        return (signature_holds(key, statement, read(data["signature"])) and
                all(said[k] == data[k] for k in ("bundle", "decision", "step", "person")) and
                reviewer["person"] == said["person"] and data["step"] in reviewer["steps"] and
                said["person"].strip().casefold() != asked["requester"].strip().casefold() and
                data["key"] not in asked["requester_keys"] and words.count(statement) == 1)

    for e in events:
        data = e["data"]
        if e["type"] == "artifact":
            hold(is_recorded, data["path"], data["sha256"], data["bytes"])
            hold(is_recorded, data["path"] + ".intoto.jsonl", data["sidecar"])
        elif e["type"] == "recovered":
            hold(is_recorded, data["path"], data["sha256"])
        elif e["type"] == "config":
            config = data
            keys = {fingerprint(key_bytes(r["key"])): (key_bytes(r["key"]), r) for r in data["reviewers"]}
        elif e["type"] in ("review-requested", "signoff"):
            hold(signoff_holds if e["type"] == "signoff" else review_holds, e, data)
    if config:
        hold(is_recorded, "task.toml", config["sha256"])
    elif not torn:
        findings.append("no configuration is recorded")
    if os.path.lexists(os.path.join(root, "events.lock")):
        hold(is_recorded, "events.lock", sha(b""))
    for folder in [""] + ["C%d/" % n for n in range(11)] + ["task/"]:
        if os.path.lexists(os.path.join(root, folder + "index.md")):
            hold(is_page, folder + "index.md")
    return (1 if findings else 2 if torn else 0), findings

if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(64)
    status, found = verify(sys.argv[1], *(open(kept, encoding="utf-8").read() for kept in sys.argv[2:]))
    print("\n".join([ascii(line) for line in found] + [["pass", "fail", "inconclusive"][status]]))
    sys.exit(status)
