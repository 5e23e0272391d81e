"""A small model with a byte tokenizer behind the real server, and what the page shows of it."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from adaponder import AdaPonderForCausalLM
from adaponder.checkpoints.loading import tokenizer_of
from adaponder.checkpoints.shipped import sample_path
from adaponder.conversion.open import load
from adaponder.serving.served import Served
from support import stir

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog

END = "<|endoftext|>"
POSITIONS, ITERATIONS = 768, 4
MERGES = ["Ġ Ġ", "ĠĠ ĠĠ", "d e", "de f", "Ġ r", "s e", "se l", "sel f", "i n", "o r"]
TEXT = "def f(self):\n    return [x for x in self]\n"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x01\x7f \u202egnp.exe\u202c \u2066\u200b " + "w" * 90


def browser_path() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Opens a browser without its sandbox, which containers forbid: it opens our own page only."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@contextmanager
def hosted(folder: Path) -> Iterator[str]:
    """Serves a folder's files as a static host does; yields the address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def shipped_checkpoint(name: str) -> Served:
    folder = sample_path(name)
    model, _ = load(str(folder), dtype="float32")
    return Served(model, tokenizer_of(folder), folder, name=name)


def byte_words() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are all bytes and a few pairs, so that it spells any text."""
    words = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [merge.replace(" ", "") for merge in MERGES]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def small_model(method: str = "adaponder", iterations: int = ITERATIONS) -> AdaPonderForCausalLM:
    """A random model; the gates of ``adaponder`` disagree about tokens: at tau = 0.5 depths differ."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        vocab_size=257 + len(MERGES),
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    backbone = GPTNeoXForCausalLM(config).eval()
    return stir(AdaPonderForCausalLM.from_backbone(backbone, method=method, iterations=iterations, tau=0.5)).eval()


@contextmanager
def serving(model: AdaPonderForCausalLM | None = None, *, key: str | None = None) -> Iterator[str]:
    """Runs a server of a model, by default the small one, and yields its address; ``key`` is then required."""
    import serving_support
    from adaponder.serving.settings import Access, Key, Settings

    served = Served(model or small_model(), byte_words(), name="small")
    settings = Settings(lanes=4, access=Access(keys=() if key is None else (Key.of(key),)))
    with serving_support.serving(served, settings) as running:
        yield running.address


def post(address: str, path: str, **body: Any) -> dict[str, Any]:
    return httpx.post(f"{address}/{path}", json=body, timeout=20, trust_env=False).raise_for_status().json()


def score(address: str, prompt: str | list[int], **adaponder: Any) -> dict[str, Any]:
    return post(address, "score", prompt=prompt, full_depth=True, adaponder={"gates": True, **adaponder})


class Explorer:
    """The page in a tab that shares nothing with others.

    Attributes:
        heard: console messages and uncaught errors.
        asked: addresses of all requests.
    """

    def __init__(self, browser: Browser, address: str, **device: Any):
        device = {"viewport": {"width": 1280, "height": 900}, **device}
        context = browser.new_context(reduced_motion="reduce", **device)
        context.set_default_timeout(15_000)
        self.address, self.page = address, context.new_page()
        self.heard: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.heard.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.heard.append(f"error: {error}"))
        self.page.on("dialog", self._dismiss)
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _dismiss(self, dialog: Dialog) -> None:
        self.heard.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, fragment: str = "") -> Explorer:
        self.page.goto(f"{self.address}/{fragment}")
        self.page.wait_for_selector("html[data-ready]")
        self.settle()
        return self

    def reset(self) -> None:
        """Empties the text and the lists; one rule, wide, light."""
        self.page.set_viewport_size({"width": 1280, "height": 900})
        self.page.mouse.move(2, 2)
        self.page.emulate_media(color_scheme="light")
        self.page.evaluate("() => { location.hash = `text=&a=gate:0.5&most=64&reset=${Math.random()}`; }")
        self.until("document.getElementById('text').value === ''")
        self.page.wait_for_selector("html:not([data-shown])")
        self.heard.clear()
        self.asked.clear()

    def check(self) -> None:
        """Checks that the console is empty, and that no request left the server's address or held any of the text."""
        assert self.heard == []
        assert [url for url in self.asked if not url.startswith((self.address, "blob:", "data:"))] == []
        assert [url for url in self.asked if "#" in url or "?" in url] == []

    def settle(self) -> None:
        """Waits until everything about the text is shown."""
        self.page.wait_for_selector("html[data-shown=detailed]:not([data-writing])")

    def until(self, condition: str) -> None:
        """Waits for JavaScript to be true; Playwright's own way needs ``eval``, which the page forbids."""
        deadline = time.monotonic() + 15
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(10)

    def fill(self, text: str) -> None:
        self.page.fill("#text", text)
        self.settle()

    def dial(self, place: float) -> None:
        self.page.evaluate(f"""() => {{ const dial = document.getElementById("A-dial");
            dial.value = {place} * dial.max; dial.dispatchEvent(new Event("input")); }}""")
        self.settle()

    def tokens(self, where: str = "#mirror") -> list[tuple[str, int]]:
        """Returns text and depth of each coloured span."""
        script = "all => all.map((span) => [span.textContent, Number(span.dataset.depth)])"
        return [tuple(span) for span in self.page.eval_on_selector_all(f"{where} .token[data-slot]", script)]

    def columns(self, where: str = "#grid-a") -> list[int]:
        return self.page.eval_on_selector_all(f"{where} .column", "all => all.map((bar) => Number(bar.dataset.depth))")

    def stat(self, name: str) -> str:
        return self.page.inner_text(f"#summary-a [data-stat='{name}'] .value")

    def text(self) -> str:
        return self.page.input_value("#text")

    def fragment(self) -> str:
        """Returns the link to this state, once it is in the address."""
        self.page.wait_for_timeout(300)
        return self.page.evaluate("location.hash").removeprefix("#")

    def rule(self, side: str = "A") -> str:
        return self.page.inner_text(f"#dial-{side.lower()} output")


def spans(scores: dict[str, Any]) -> list[tuple[str, int]]:
    """Returns the spans that show an answer: tokens without text, parts of a character, have none."""
    return [(token["text"], token["depth"]) for token in scores["tokens"] if token["text"]]
