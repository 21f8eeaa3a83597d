"""Drives a headless Chromium over its debugging protocol; needs the package websocket-client."""
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request

import websocket

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def program():
    for name in PROGRAMS:
        if shutil.which(name):
            return name
    return None


class Page:
    """One tab. Console messages of kind error and all exceptions are collected in `problems`."""

    def __init__(self, width=1000, height=760, dark=False):
        self.folder = tempfile.mkdtemp()
        self.process = subprocess.Popen(
            [program(), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--remote-allow-origins=*",
             f"--window-size={width},{height}", f"--user-data-dir={self.folder}", "--no-first-run",
             *(["--force-dark-mode"] if dark else []), "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.problems = []
        self.requests = []
        self.next = 0
        port = self.wait(lambda: self.port(), 60)
        tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30))
        tab = next(tab for tab in tabs if tab["type"] == "page")
        self.socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=60)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        if dark:
            self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def port(self):
        path = os.path.join(self.folder, "DevToolsActivePort")
        if not os.path.exists(path):
            return None
        with open(path) as file:
            lines = file.read().split()
        return lines[0] if lines else None

    @staticmethod
    def wait(claim, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            result = claim()
            if result:
                return result
            time.sleep(0.05)
        raise TimeoutError(f"not so within {seconds} s")

    def note(self, message):
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(parameters["exceptionDetails"].get("text", "") + str(parameters["exceptionDetails"].get("exception", "")))
        if method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def call(self, method, **parameters):
        self.next += 1
        self.socket.send(json.dumps({"id": self.next, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.next:
                if "error" in message:
                    raise RuntimeError(message["error"])
                return message["result"]
            self.note(message)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait(lambda: self.value("document.readyState") == "complete", 30)

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, expression, seconds=30):
        return self.wait(lambda: self.value(expression), seconds)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, modifiers=0):
        code = {"Enter": 13, "Escape": 27}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, modifiers=modifiers,
                      **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}))

    def click(self, selector):
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def close(self):
        try:
            self.socket.close()
        finally:
            self.process.terminate()
            self.process.wait(30)
            shutil.rmtree(self.folder, ignore_errors=True)
