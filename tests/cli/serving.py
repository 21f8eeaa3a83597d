"""A server for tests: the program on a free port, and plain HTTP to it."""
import http.client
import json
import os
import signal
import subprocess
import tempfile

import support

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

    def __init__(self, *flags, exact=EXACT):
        self.log = tempfile.TemporaryFile("w+")
        port = [] if "--port" in flags else ["--port", "0"]
        self.process = subprocess.Popen([support.BINARY, "serve", *port, *exact, *flags], stdout=subprocess.PIPE, stderr=self.log,
                                        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.line = self.process.stdout.readline().strip()
        if not self.line:
            self.process.wait(60)
            raise AssertionError(self.messages())
        self.port = int(self.line.rsplit(":", 1)[1])
        self.url = f"http://127.0.0.1:{self.port}"

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


def events(text):
    """The objects of a stream of server-sent events, which must end as it should."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]
