#!/usr/bin/env python3
"""The times that clients see, as aiperf measures them and as `megatron bench serve` does: both at once, so that what else the machine does
meets both, together at half the rate at which the server is saturated. Requests of each come at even distances, which differ, so that
neither always comes just after the other.

Usage: load_test.py BINARY [unittest arguments], with aiperf on the path (make clients sets it up).
"""
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import support  # noqa: E402
from serving import GOLDEN, Server  # noqa: E402

import served_model  # noqa: E402

PROMPT, OUTPUT, WARMUP, ROUNDS = 32, 16, 4, 3
FASTER = 9 / 8  # the rate of `bench serve` over aiperf's
WORDS = "the of and to a in is it you that he was for on are with as his they at be this from have or by one had not but what all".split()


class LoadTest(support.FolderTest):
    def prompt_of(self, server, draw):
        """A text of as many tokens as the prompts of the other side."""
        text, misses = draw.choice(WORDS), 0
        while True:
            count = server.ok("/tokenize", {"prompt": text})["count"]
            if count == PROMPT:
                return text
            if count > PROMPT:
                text, misses = text.rsplit(" ", 1)[0], misses + 1
                self.assertLess(misses, 200, text)
            text += " " + draw.choice(WORDS)

    def bench(self, server, requests, *flags):
        return json.loads(self.output("bench", "serve", "--url", server.url, "--num-requests", str(requests), "--prompt-tokens", str(PROMPT),
                                      "--output-tokens", str(OUTPUT), "--seed", str(self.seed), *flags, "--json"))

    def both(self, server, requests, rate):
        """What aiperf and `bench serve` say of requests that they send at the same time."""
        results = {}
        before = self.answered(server)
        threads = [threading.Thread(target=lambda: results.update(theirs=self.aiperf(server, requests, rate)))]
        threads[0].start()
        while threads[0].is_alive() and self.answered(server) < before + WARMUP:
            time.sleep(0.05)
        flags = ["--num-warmup", "0", "--request-rate", str(rate * FASTER), "--arrival-pattern", "constant", "--concurrency", "1000"]
        threads.append(threading.Thread(target=lambda: results.update(ours=self.bench(server, int(requests * FASTER), *flags))))
        threads[1].start()
        for thread in threads:
            thread.join()
        return results["theirs"], results["ours"]

    def answered(self, server):
        match = re.search(r'responses_total\{route="/v1/completions",status="200"\} (\d+)', server.ok("/metrics"))
        return int(match[1]) if match else 0

    def keep_a_tokenizer(self):
        """aiperf wants one though the server counts, by its name, and looks in the cache of the hub first."""
        place = self.path("hf/hub/models--tests--words")
        commit = "0" * 40
        shutil.copytree(os.path.join(GOLDEN, "chat", "tokenizer"), os.path.join(place, "snapshots", commit))
        with open(os.path.join(place, "snapshots", commit, "config.json"), "w") as stream:
            json.dump({"model_type": "llama"}, stream)
        os.mkdir(os.path.join(place, "refs"))
        with open(os.path.join(place, "refs", "main"), "w") as stream:
            stream.write(commit)
        return {"HF_HOME": self.path("hf"), "HF_HUB_OFFLINE": "1"}

    def aiperf(self, server, requests, rate):
        draw = random.Random(self.seed)
        with open(self.path("prompts.jsonl"), "w") as stream:
            stream.writelines(json.dumps({"text": self.prompt_of(server, draw)}) + "\n" for _ in range(requests))
        folder = self.path(f"aiperf{self.seed}")
        done = subprocess.run(
            ["aiperf", "profile", "--model", served_model.NAME, "--url", server.url, "--endpoint-type", "completions", "--streaming",
             "--input-file", self.path("prompts.jsonl"), "--custom-dataset-type", "single_turn", "--request-rate", str(rate), "--arrival-pattern",
             "constant", "--request-count", str(requests), "--warmup-request-count", str(WARMUP), "--extra-inputs", f"max_tokens:{OUTPUT}", "--extra-inputs",
             "ignore_eos:true", "--extra-inputs", "temperature:0", "--tokenizer", "tests/words",
             "--use-server-token-count", "--output-artifact-dir", folder, "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"],
            capture_output=True, text=True, timeout=600, env={**os.environ, **self.hub})
        self.assertEqual(done.returncode, 0, done.stdout[-3000:] + done.stderr[-3000:])
        with open(os.path.join(folder, "profile_export_aiperf.json")) as stream:
            return json.load(stream)

    @unittest.skipUnless(shutil.which("aiperf"), "no aiperf")
    def test_aiperf(self):
        server = Server(served_model.path(), *served_model.FLAGS, exact=["--device", "cpu", "--num-threads", "1"])
        self.addCleanup(server.close)
        self.seed, self.hub = 0, self.keep_a_tokenizer()
        saturated = self.bench(server, 40, "--concurrency", "16")
        rate = round(saturated["completed"] / saturated["seconds"] / 2 / (1 + FASTER), 3)
        # For 40 seconds or more: aiperf's throughput has the time before its first request in it, up to a second.
        requests = min(600, max(48, int(40 * rate)))
        theirs, ours = [], []
        for self.seed in range(1, ROUNDS + 1):
            for result, results in zip(self.both(server, requests, rate), (theirs, ours)):
                results.append(result)
        print(f"\n  {requests} requests of each in {ROUNDS} rounds, at {rate} a second")
        for name, of_theirs, of_ours, most in (
                ("output tokens a second, of those asked for", lambda r: r["output_token_throughput"]["avg"] / (rate * OUTPUT),
                 lambda r: r["output_tokens"] / r["seconds"] / (rate * FASTER * OUTPUT), 0.03),
                ("first token, ms", lambda r: r["time_to_first_token"]["p50"], lambda r: r["first_token_ms"]["p50"], 0.10),
                ("between tokens, ms", lambda r: r["inter_token_latency"]["p50"], lambda r: r["per_token_ms"]["p50"], 0.10),
                ("whole request, ms", lambda r: r["request_latency"]["p50"], lambda r: r["whole_ms"]["p50"], 0.10)):
            pairs = [(of_theirs(a), of_ours(b)) for a, b in zip(theirs, ours)]
            theirs_median, ours_median = (statistics.median(side) for side in zip(*pairs))
            print(f"  {name}: {theirs_median:.2f} by aiperf, {ours_median:.2f} by bench serve, ratio {theirs_median / ours_median:.3f}")
            with self.subTest(name):
                self.assertLess(abs(theirs_median / ours_median - 1), most, pairs)


if __name__ == "__main__":
    support.main()
