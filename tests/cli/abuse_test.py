"""`megatron serve` under abuse: a thousand good requests at a time next to slow ones, broken ones, hostile ones and clients that leave.

MEGATRON_ABUSE_SECONDS: how long; `make test` has a short form, whose limits of time are wider since other tests run beside it.
"""
import asyncio
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import socket
import struct
import tempfile
import time
import unittest

import support
from serving import GOLDEN, Server, train_talker

SECONDS = float(os.environ.get("MEGATRON_ABUSE_SECONDS", "3"))
WHOLE = SECONDS >= 60
SLACK = 1 if WHOLE else 20 if os.environ.get("MEGATRON_SANITIZE") else 5
TOGETHER, SLOW, HEADER_SECONDS = 1000, 200, 2.0
BAD, LEFT = 50, 20  # hostile requests and clients that leave: more than so many, however slow the machine is
KEY, ADMIN = "0123456789abcdef", "fedcba9876543210"
TABLE = os.path.join(GOLDEN, "..", "..", "megatron", "serving", "api_server.cc")


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def relative_growth(samples):
    """Over all samples by a straight line, as a share of their mean."""
    middle, mean = (len(samples) - 1) / 2, sum(samples) / len(samples)
    slope = sum((i - middle) * y for i, y in enumerate(samples)) / sum((i - middle) ** 2 for i in range(len(samples)))
    return slope * len(samples) / mean


def request(body, key=KEY, headers=""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n{headers}"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


async def exchange(port, data):
    """Sends bytes; status, fields and body of the reply, after which the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        head, _, body = (await asyncio.wait_for(reader.read(-1), 60)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]) if lines[0] else 0, fields, body


class Good:
    """Waves of as many requests at once, each of which has one right answer."""

    def __init__(self, port, answers):
        self.port, self.answers, self.random = port, answers, random.Random(1)
        self.seconds, self.refused = [], 0

    async def one(self, body, answer):
        begin = time.monotonic()
        while True:
            status, fields, data = await exchange(self.port, request(body))
            if status == 200:
                break
            assert status in (429, 503), (status, data)
            assert int(fields["retry-after"]) >= 1, fields
            self.refused += 1
            await asyncio.sleep(self.random.uniform(0.1, 0.3))
        self.seconds.append(time.monotonic() - begin)
        choice = json.loads(data)["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == answer, (body, choice, answer)

    async def run(self, seconds, between=lambda: None, enough=lambda: True):
        """For so long, and for at most a minute more until there is enough."""
        end = time.monotonic() + seconds
        while not self.seconds or time.monotonic() < end or (not enough() and time.monotonic() < end + 60):
            await asyncio.gather(*(self.one(*self.random.choice(self.answers)) for _ in range(TOGETHER)))
            between()


def hostile_requests():
    """(what it is, bytes, statuses); where too many wait, 429 is right, too."""
    def asking(**members):
        return request({"prompt": "a", "max_tokens": 2, **members})

    plain = b'{"prompt": "a", "max_tokens": 1}'
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(plain), plain)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n".encode()
    yield "10 GiB declared", head + b"Content-Length: 10737418240\r\n\r\n", (413,)
    yield "CL.TE", head + b"Content-Length: 32\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks, (400,)
    yield "TE.CL", head + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n" + chunks, (400,)
    yield "two lengths", head + b"Content-Length: 32\r\nContent-Length: 0\r\n\r\n" + plain, (400,)
    for deep in (b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 100_000):
        yield "depth 10^5", request(deep), (400,)
    for member in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        for value in (b"NaN", b"-1e308", b"1e999", b"Infinity", b'"x"'):
            yield f"{member} {value.decode()}", request(b'{"prompt": "a", "%s": %s}' % (member.encode(), value)), (400,)
    for members in ({"max_tokens": 10 ** 9}, {"max_tokens": -1}, {"n": 10 ** 6}, {"n": 0}, {"top_k": -5}, {"logprobs": 10 ** 9},
                    {"seed": "x"}, {"stop": ["a"] * 10_000}, {"logit_bias": {"99999999": 1}}, {"prompt": [10 ** 9]}, {"prompt": [-3]},
                    {"prompt": "a" * 100_000}, {"stop_token_ids": [10 ** 7]}, {"min_tokens": 99}):
        yield str(members)[:40], asking(**members), (400,)
    yield "broken UTF-8", request(b'{"prompt": "\xff\xfe"}'), (400,)
    yield "no JSON", request(b"\x00\x01{"), (400,)
    yield "wrong key", request({"prompt": "a"}, key=KEY[:-1] + "0"), (401,)
    yield "no such route", head.replace(b"completions", b"nothing") + b"\r\n", (404,)


class Abuse:
    def __init__(self, port):
        self.port, self.end = port, math.inf
        self.counts, self.slowest, self.late, self.faults = {}, {}, 0, []

    def count(self, what, seconds):
        self.counts[what] = self.counts.get(what, 0) + 1
        self.slowest[what] = max(self.slowest.get(what, 0.0), seconds)
        self.late += what == "bad" and seconds > 1
        if self.counts.get("bad", 0) > BAD and self.counts.get("left", 0) > LEFT:
            self.enough.set()

    async def slow(self, index):
        """A header, or a body, that comes byte by byte and never ends."""
        begin = request(b"x" * 200)[:-200] if index % 2 else b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: "
        while not self.stopped():
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            start = time.monotonic()
            try:
                writer.write(begin)
                reply = asyncio.ensure_future(reader.read(-1))
                while not reply.done() and time.monotonic() - start < 60:
                    writer.write(b"x")
                    await asyncio.wait([reply], timeout=0.25)
                if not reply.done():
                    self.faults.append(("slow", index, "the connection stays open"))
                reply.cancel()
            except ConnectionError:
                pass
            writer.close()
            self.count("slow", time.monotonic() - start)

    async def hostile(self, index):
        requests = list(hostile_requests())
        while not self.stopped():
            for what, data, statuses in requests[index:] + requests[:index]:
                if self.stopped():
                    return
                start = time.monotonic()
                try:
                    status, _, body = await exchange(self.port, data)
                    if status not in (*statuses, 429) or not json.loads(body)["error"]["message"]:
                        self.faults.append((what, status, body.decode()[:200]))
                except ConnectionError:  # before all of it was read
                    status = None
                self.count("bad" if status else "closed", time.monotonic() - start)
                await asyncio.sleep(0.03)

    async def leaving(self, index):
        """Clients that go away in their stream, half of them without a word."""
        draw = random.Random(index)
        while not self.stopped():
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            start = time.monotonic()
            writer.write(request({"prompt": "abc", "max_tokens": 150, "ignore_eos": True, "stream": True, "n": 2}))
            try:
                await reader.read(1 + draw.randrange(600))
            except ConnectionError:
                pass
            if draw.randrange(2):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            self.count("left", time.monotonic() - start)
            await asyncio.sleep(0.2)

    def stopped(self):
        return self.stop.is_set()

    def run(self, stop, enough, results):
        self.stop, self.enough = stop, enough
        os.nice(10)  # it comes from other machines

        async def all_of_them():
            await asyncio.gather(*(self.slow(i) for i in range(SLOW)), *(self.hostile(7 * i) for i in range(4)),
                                 *(self.leaving(i) for i in range(4)))

        try:
            asyncio.run(all_of_them())
        except Exception as error:  # told by the test
            self.faults.append(("the abuse", None, repr(error)))
        results.put((self.counts, self.slowest, self.late, self.faults))


class AbuseTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
        cls.folder = tempfile.mkdtemp()
        model, keys = os.path.join(cls.folder, "talker"), os.path.join(cls.folder, "keys")
        train_talker(model)
        with open(keys, "w") as stream:
            stream.write(f"a:{KEY}\nroot:{ADMIN}:admin\n")
        cls.server = Server(model, "--api-key-file", keys, "--inference-max-requests", "32", "--inference-dynamic-batching-block-size",
                            "8", "--max-waiting-requests", "600", "--header-timeout-seconds", str(HEADER_SECONDS),
                            "--body-timeout-seconds", str(HEADER_SECONDS),
                            environment={"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0"})

    @classmethod
    def tearDownClass(cls):
        cls.server.close()
        shutil.rmtree(cls.folder)

    def held(self):
        """Descriptors, threads, blocks that texts hold, resident KiB."""
        process = f"/proc/{self.server.process.pid}"
        with open(process + "/status") as stream:
            status = dict(line.split(":\t", 1) for line in stream.read().split("\n") if ":\t" in line)
        metrics = self.server.ask("/metrics", headers={"Authorization": f"Bearer {KEY}"})[1]
        blocks = re.search(r'megatron_cache_blocks\{state="held"\} (\S+)', metrics).group(1)
        return len(os.listdir(process + "/fd")), int(status["Threads"]), int(float(blocks)), int(status["VmRSS"].split()[0])

    def answers(self):
        draw, stem = random.Random(2), "The cat sat on the mat and looked at all of the"
        found = []
        for i in range(16):
            prompt = stem[:draw.randrange(1, len(stem))] + draw.choice(["", " 1, 2", " x", "zz"])
            body = {"prompt": prompt, "max_tokens": 1 + i % 6, "temperature": 0, "return_token_ids": True}
            status, _, data = asyncio.run(exchange(self.server.port, request(body)))
            self.assertEqual(status, 200, data)
            choice = json.loads(data)["choices"][0]
            found.append((body, (choice["text"], choice["token_ids"], choice["finish_reason"])))
        return found

    def check_keys(self):
        """Every route of the server's table asks for a key, and those of operators for an operator's."""
        with open(TABLE) as stream:
            routes = re.findall(r'\{"([A-Z]+)", "(/[^"]*)", Action::', stream.read())
        self.assertGreater(len(routes), 20)
        for method, path in routes:
            for headers in ({}, {"Authorization": f"Bearer {KEY[:-1]}0"}):
                self.assertEqual(self.server.ask(path, {}, method, headers)[0], 401, path)
            if path.startswith("/admin/"):
                self.assertEqual(self.server.ask(path, {}, method, {"Authorization": f"Bearer {KEY}"})[0], 403, path)

    def listening_addresses(self):
        found = []
        for name in ("tcp", "tcp6"):
            if not os.path.exists(f"/proc/net/{name}"):
                continue
            with open(f"/proc/net/{name}") as stream:
                rows = [line.split() for line in stream.readlines()[1:]]
            found += [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == self.server.port]
        return found

    def test_good_requests_are_served_beside_all_of_it(self):
        self.assertEqual(self.listening_addresses(), ["0100007F"])
        answers = self.answers()
        good = Good(self.server.port, answers)
        asyncio.run(good.run(SECONDS / 10))  # warm
        good.seconds.clear()
        asyncio.run(good.run(SECONDS / 5))
        calm, refused = percentile(good.seconds, 0.99), good.refused
        self.assertGreater(refused, 0)
        before = self.held()
        context = multiprocessing.get_context("fork")
        stop, enough, results = context.Event(), context.Event(), context.Queue()
        abuse = context.Process(target=Abuse(self.server.port).run, args=(stop, enough, results))
        abuse.start()
        self.addCleanup(abuse.kill)
        resident = []
        good.seconds.clear()
        asyncio.run(good.run(max(SECONDS, HEADER_SECONDS + 1), lambda: resident.append(self.held()[3]), enough.is_set))
        self.check_keys()
        stop.set()
        counts, slowest, late, faults = results.get(timeout=120)
        abuse.join(60)
        for _ in range(200):
            after = self.held()
            if after[:3] == before[:3]:
                break
            time.sleep(0.1)
        beside = percentile(good.seconds, 0.99)
        growth = relative_growth(resident[len(resident) // 5:]) if len(resident) > 10 else 0.0
        print(f"{len(good.seconds)} good requests, {good.refused} tries refused; p99 {calm:.3f} s, {beside:.3f} s beside the abuse; "
              f"{counts}, slowest { {what: round(s, 3) for what, s in slowest.items()} }, "
              f"{late} bad ones after a second; resident {resident[-1]} KiB, "
              f"growth {100 * growth:.2f}%", flush=True)
        self.assertEqual(faults[:3], [])
        self.assertGreaterEqual(len(good.seconds), TOGETHER)
        self.assertGreaterEqual(counts["slow"], SLOW)
        self.assertGreater(counts["bad"], BAD)
        self.assertNotIn("closed", counts, "bad requests without an answer")
        self.assertGreater(counts["left"], LEFT)
        self.assertEqual(after[:3], before[:3], "descriptors, threads, blocks")
        self.assertLess(slowest["bad"], 1.0 * SLACK)
        self.assertLess(slowest["slow"], HEADER_SECONDS + 1.0 * SLACK)
        self.assertLess(beside, 2.0 * calm * SLACK)
        if WHOLE:
            self.assertLess(growth, 0.01)
        self.assertIsNone(self.server.process.poll())
        self.assertEqual(self.server.stop(), 0, self.server.messages())


if __name__ == "__main__":
    support.main()
