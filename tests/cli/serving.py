"""A server for tests: the program on a free port, and plain HTTP to it."""
import http.client
import json
import os
import signal
import subprocess
import tempfile
import time

import support
from ports import free_port

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden")
EXACT = ["--device", "cpu", "--dtype", "fp64", "--num-threads", "1"]
PRETRAIN = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "256", "--tokenizer-type",
            "HuggingFaceTokenizer", "--tokenizer-model", os.path.join(GOLDEN, "chat", "tokenizer"), "--micro-batch-size", "2",
            "--global-batch-size", "2", "--train-iters", "2", "--lr", "1e-2", "--mock-data", "--eval-iters", "0", "--device", "cpu",
            "--num-threads", "1", "--init-method-std", "0.3", "--save-interval", "1"]


def train_talker(folder, *flags):
    """A model of the tokenizer in tests/golden/chat, which has a chat template, trained so little that its replies differ."""
    result = support.call("pretrain", *PRETRAIN, "--save", folder, *flags)
    assert result.returncode == 0, result.stderr


class Server:
    """A server on a free port; `log` has what it writes to standard error."""

    def __init__(self, *flags, exact=EXACT, environment=None):
        self.log = tempfile.TemporaryFile("w+")
        port = [] if "--port" in flags else ["--port", "0"]
        self.command = [support.BINARY, "serve", *port, *exact, *flags]
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=self.log,
                                        text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})})
        self.start_others()
        self.line = self.process.stdout.readline().strip()
        if not self.line:
            self.process.wait(60)
            raise AssertionError(self.messages())
        self.port = int(self.line.rsplit(":", 1)[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def start_others(self):
        """Of a server of several processes, those that follow the first."""

    def messages(self):
        if self.log.closed:
            return self.said
        self.log.seek(0)
        return self.log.read()

    def ask(self, path, body=None, method=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        text = None if body is None else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), path, text, headers or {})
        response = connection.getresponse()
        data = response.read().decode()
        connection.close()
        kind = response.getheader("Content-Type", "")
        return response.status, json.loads(data) if kind.startswith("application/json") else data

    def ok(self, path, body=None, method=None):
        status, answer = self.ask(path, body, method)
        assert status == 200, answer
        return answer

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.close()
        return code

    def close(self):
        if self.log.closed:
            return
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        self.process.stdout.close()
        self.log.seek(0)
        self.said = self.log.read()
        self.log.close()


class Ranks(Server):
    """A server of several ranks, as torchrun would start them."""

    def __init__(self, ranks, *flags):
        self.processes = []
        self.variables = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                          "MASTER_PORT": str(free_port())}
        super().__init__(*flags, environment=self.of(0))

    def of(self, rank):
        return {**self.variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}

    def start_others(self):
        self.processes = [self.process]
        for rank in range(1, int(self.variables["WORLD_SIZE"])):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.of(rank)}
            self.processes.append(subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=self.log, env=environment))

    def wait(self, seconds):
        """The exit codes of all ranks, which must have ended by then."""
        end = time.monotonic() + seconds
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]

    def stop(self, number=signal.SIGTERM):
        for process in self.processes:
            process.send_signal(number)
        codes = self.wait(60)
        self.close()
        return codes

    def close(self):
        for process in self.processes[1:]:
            if process.poll() is None:
                process.kill()
            process.wait(60)
        super().close()


def events(text):
    """The objects of a stream of server-sent events, which must end as it should."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]
