#!/usr/bin/env python3
"""Two replicas behind routers that are not ours, as docs/serving.md configures them: HAProxy and vllm-router. Conversations under way keep
their cached prefixes; one replica is drained and replaced, the other is killed, and no request is lost after one retry.

Usage: routers_test.py BINARY [unittest arguments], with haproxy and vllm-router on the path (make clients sets them up).
"""
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import support  # noqa: E402
from ports import free_port  # noqa: E402
from serving import GOLDEN, Server  # noqa: E402

import served_model  # noqa: E402

CLIENTS, TURNS = 6, 5


def manual_block(mark):
    """The block of docs/serving.md that has this text."""
    with open(os.path.join(GOLDEN, "..", "..", "docs", "serving.md"), encoding="utf-8") as stream:
        blocks = stream.read().split("```")[1::2]
    return next(block.split("\n", 1)[1] for block in blocks if mark in block)


class Conversation:
    """One after another, until it is told to end; each turn has all that was said before."""

    def __init__(self, port, number, salt="routed"):
        self.port, self.number, self.salt = port, number, salt
        self.lost, self.retried, self.replies, self.prompt_tokens, self.cached_tokens = [], 0, [], 0, 0

    def post(self, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()

    def ask(self, body):
        status, text = self.post(body)
        if status != 200:
            self.retried += 1
            status, text = self.post(body)
        if status != 200:
            self.lost.append((status, text[:200]))
            return "lost"
        answer = json.loads(text)
        self.prompt_tokens += answer["usage"]["prompt_tokens"]
        self.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"]

    def hold(self, which):
        messages = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{which}, {self.number}: the question {turn} is what of it? " + "What of it? " * 3})
            # The second client sends keys, the others leave the choice to what was said.
            key = {"prompt_cache_key": f"{self.number} {which}"} if self.number == 1 else {}
            reply = self.ask({**key, "messages": messages, "temperature": 0, "max_tokens": 8, "cache_salt": self.salt, "ignore_eos": True})
            self.replies.append(reply)
            messages.append({"role": "assistant", "content": reply})

    def run(self, first, stop):
        which = first
        while which == first or not stop.is_set():
            self.hold(which)
            which += 1


def converse(port, first, during=lambda: None, salt="routed"):
    """Conversations of all clients at once while `during` runs."""
    stop, held = threading.Event(), [Conversation(port, number, salt) for number in range(CLIENTS)]
    threads = [threading.Thread(target=conversation.run, args=(first, stop)) for conversation in held]
    for thread in threads:
        thread.start()
    try:
        during()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return held


def cached_share(held):
    return sum(conversation.cached_tokens for conversation in held) / sum(conversation.prompt_tokens for conversation in held)


class RoutersTest(support.FolderTest):
    def setUp(self):
        super().setUp()
        self.ports = [free_port(), free_port()]
        self.replicas = [None, None]
        for which in range(2):
            self.start(which)
        self.addCleanup(lambda: [replica.close() for replica in self.replicas])

    def start(self, which):
        self.replicas[which] = Server(served_model.path(), "--port", str(self.ports[which]), *served_model.FLAGS)

    def with_ports(self, text, port):
        return text.replace("127.0.0.1:8001", f"127.0.0.1:{self.ports[0]}").replace(
            "127.0.0.1:8002", f"127.0.0.1:{self.ports[1]}").replace("8080", str(port))

    def running(self, command):
        log = open(self.path("router.log"), "w+")
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)

        def end():
            process.kill()
            process.wait()
            log.close()

        self.addCleanup(end)
        return process

    def router_log(self):
        with open(self.path("router.log")) as log:
            return log.read()[-6000:]

    def wait_for_router(self, port):
        deadline = time.monotonic() + 60
        while Conversation(port, 0).post({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})[0] != 200:
            self.assertLess(time.monotonic(), deadline, self.router_log())
            time.sleep(0.2)

    def served(self):
        """Responses of each replica so far."""
        counts = []
        for replica in self.replicas:
            text = replica.ok("/metrics") if replica.process.poll() is None else ""
            match = re.search(r'responses_total\{route="/v1/chat/completions",status="200"\} (\d+)', text)
            counts.append(int(match[1]) if match else 0)
        return counts

    def wait_for_replies(self, which):
        """Until the replica has answered some requests more."""
        begin, deadline = self.served()[which], time.monotonic() + 120
        while self.served()[which] < begin + 2 * CLIENTS:
            self.assertLess(time.monotonic(), deadline, f"replica {which} is not asked, served {self.served()}: {self.router_log()}")
            time.sleep(0.1)

    def lose_replicas(self):
        self.wait_for_replies(0)
        draining = self.replicas[0]
        draining.process.send_signal(signal.SIGTERM)
        self.assertEqual(draining.process.wait(60), 0, draining.messages())
        self.wait_for_replies(1)
        draining.close()
        self.start(0)
        self.wait_for_replies(0)  # it is back
        self.replicas[1].process.kill()
        self.replicas[1].process.wait()
        self.wait_for_replies(0)

    def show(self, port):
        self.wait_for_router(port)
        # Nobody is lost: the cache serves as if there were one replica.
        routed = converse(port, 0)
        self.assertTrue(all(served > 1 for served in self.served()), f"{self.served()}: {self.router_log()}")
        direct = converse(self.ports[0], 0, salt="direct")
        self.assertEqual([conversation.replies for conversation in routed], [conversation.replies for conversation in direct])
        self.assertGreater(cached_share(routed), 0.9 * cached_share(direct))
        held = converse(port, 1, self.lose_replicas)
        lost = [loss for conversation in held for loss in conversation.lost]
        self.assertEqual(lost[:3], [], self.router_log())
        self.assertGreater(cached_share(held), 0.5 * cached_share(direct))
        replies = sum(len(conversation.replies) for conversation in held)
        print(f"\n  {replies} replies while one of two replicas is drained and the other killed, {sum(c.retried for c in held)} retried, none lost;"
              f" {cached_share(routed):.0%} of the prompts cached, {cached_share(direct):.0%} with one replica, {cached_share(held):.0%} with losses")

    @unittest.skipUnless(shutil.which("haproxy"), "no haproxy")
    def test_haproxy(self):
        version = re.search(r"version (\d+)\.(\d+)", subprocess.run(["haproxy", "-v"], capture_output=True, text=True).stdout)
        if (int(version[1]), int(version[2])) < (2, 6):
            self.skipTest(version[0])
        port = free_port()
        with open(self.path("haproxy.cfg"), "w") as stream:
            stream.write(self.with_ports(manual_block("backend replicas"), port))
        checked = subprocess.run(["haproxy", "-c", "-f", self.path("haproxy.cfg")], capture_output=True, text=True)
        self.assertEqual((checked.returncode, checked.stderr.count("WARNING")), (0, 0), checked.stderr)
        self.running(["haproxy", "-f", self.path("haproxy.cfg")])
        self.show(port)

    @unittest.skipUnless(shutil.which("vllm-router"), "no vllm-router")
    def test_vllm_router(self):
        port = free_port()
        command = self.with_ports(manual_block("vllm-router --"), port).replace("\\\n", " ").split()
        self.running([*command, "--prometheus-port", str(free_port())])
        self.show(port)


if __name__ == "__main__":
    support.main()
