"""A fake engine for tests of the battery: one character is one token, the "model" answers the curated prompts by rule,
and it can lie in every way that the battery must notice. Its own tests are in test_prove_fake.py.

Scores are honest unless told otherwise: the target's best token is the right answer's next character.
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from ddops.prove.rescore import KNOWN_TEXT

SURE = math.log(1 - 1e-5)
END = 2  # the fake's end-of-turn token
ASSISTANT = "<|im_start|>assistant\n"

SOLUTIONS = {
    "is_palindrome": "def is_palindrome(s):\n    return s == s[::-1]",
    "fib": "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    "merge_sorted": "def merge_sorted(a, b):\n    return sorted(a + b)",
    "word_count": "def word_count(text):\n    words = text.split()\n    return {w: words.count(w) for w in words}",
    "gcd": "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a",
    "is_prime": "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, n))",
    "factorial": "def factorial(n):\n    out = 1\n    for i in range(2, n + 1):\n        out *= i\n    return out",
    "is_anagram": "def is_anagram(a, b):\n    return sorted(a) == sorted(b)",
    "flatten": "def flatten(nested):\n    return [x for row in nested for x in row]",
    "count_vowels": "def count_vowels(s):\n    return sum(c in 'aeiou' for c in s)",
    "reverse_string": "def reverse_string(s):\n    return s[::-1]",
    "find_max": "def find_max(numbers):\n    return max(numbers)",
    "find_min": "def find_min(numbers):\n    return min(numbers)",
    "digit_sum": "def digit_sum(n):\n    return sum(int(d) for d in str(n))",
    "remove_duplicates": "def remove_duplicates(items):\n    return list(dict.fromkeys(items))",
    "is_even": "def is_even(n):\n    return n % 2 == 0",
    "lcm": "def lcm(a, b):\n    import math\n    return math.lcm(a, b)",
    "is_leap_year": "def is_leap_year(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
    "is_power_of_two": "def is_power_of_two(n):\n    return n > 0 and n & (n - 1) == 0",
    "list_sum": "def list_sum(numbers):\n    return sum(numbers)",
    "second_largest": "def second_largest(numbers):\n    return sorted(set(numbers))[-2]",
    "is_sorted": "def is_sorted(items):\n    return items == sorted(items)",
    "celsius_to_fahrenheit": "def celsius_to_fahrenheit(c):\n    return c * 9 / 5 + 32",
}


@dataclass
class Lies:
    """What is wrong with the engine. `share` of requests, and only while `min_batch` requests are in flight."""

    kind: str = ""  # garbage, typo, leak, loop, drop_in_stream, decay, empty, special, doubled, script, refuse
    share: float = 1.0
    min_batch: int = 0
    modes: tuple[str, ...] = ("chain", "tree")
    skip: int = 0  # occasions at which it tells the truth first
    times: int = 10**9  # lies so many times, then never again
    after: int = 0  # decay: after so many tokens
    accept: float = 6.0  # tokens per verify pass that it reports
    token_seconds: float = 0.0
    no_scores: bool = False
    polluted_scores: bool = False
    wavering_scores: bool = False
    cached_scores: bool = False
    warm_scores_off: bool = False
    no_ids: bool = False
    no_meta: bool = False
    no_tokenize: bool = False
    no_info: bool = False
    dies_after: int = 10**9  # requests; then connections are refused
    hangs_every: int = 0  # every n-th request never ends
    trickles_every: int = 0  # every n-th stream goes on for ever
    fails_every: int = 0  # every n-th request answers 500
    cuts_first: int = 0  # the first n requests are cut off
    always: int = 0  # this status for every generation
    queue_full_first: int = 0
    reasoning: bool = False
    wrong_model: bool = False  # the model itself answers wrongly: prefill agrees
    sampled_off: bool = False  # above T=0, speculation changes the tokens
    only_sampled: bool = False  # it lies above T=0 alone
    ignores_mode: bool = False  # `speculative` is not looked at
    ignores_stop: bool = False
    ignores_limit: bool = False
    ignores_seed: bool = False
    one_noise: bool = False  # every request draws the same numbers, whatever its seed
    no_noise: bool = False  # the temperature is not looked at
    goes_on: bool = False  # an end token does not end the reply
    forgets_history: bool = False  # only the last turn reaches the model
    nonsense: bool = False  # replies that are not the protocol
    window: int = 0  # no more than so many tokens of a prompt reach the model
    trims: bool = False  # the text lacks what is blank at its end
    over_by: int = 0  # so many tokens more than /generate was asked for
    drawn_at_zero: bool = False  # close decisions at T=0 are drawn
    counts_uncached: bool = False  # a prompt that was seen before is counted as one token
    calls_all: str = ""  # the finish reason of every reply
    stops_early: int = 0  # so many characters before a stop word are lost, in streams
    scores_of_next: bool = False  # a generated token's score is its neighbour's
    spells_markers: bool = False  # /detokenize shows end tokens; no fault


@dataclass
class FakeEngine:
    """`client()` gives an httpx.Client that talks to it."""

    lies: Lies = field(default_factory=Lies)
    kind: str = "ddtree"
    dtype: str = "float32"
    algorithm: str = "DDTREE"
    max_running: int = 8
    block_size: int = 16
    context: int = 4096
    seen: list[dict[str, Any]] = field(default_factory=list)
    dead: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._count = self._running = self._lied = 0
        self._passes = self._committed = 0.0
        self._prompts: list[str] = []
        self._drawn = 0.5

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self.handle), base_url="http://engine")

    # ---- HTTP

    def handle(self, request: httpx.Request) -> httpx.Response:
        if self.dead:
            raise httpx.ConnectError("connection refused", request=request)
        path = request.url.path
        body = json.loads(request.content or b"{}") if request.method == "POST" else {}
        if path == "/health":
            return httpx.Response(200)
        if path in ("/server_info", "/get_server_info"):
            return httpx.Response(404) if self.lies.no_info or self.kind == "vllm" else httpx.Response(200, json=self._info())
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake", "max_model_len": self.context}]})
        if path == "/metrics":
            return httpx.Response(200, text=self._metrics())
        if path == "/flush_cache":
            return httpx.Response(200, text="ok")
        if path == "/tokenize":
            if self.lies.no_tokenize or "messages" in body:
                return httpx.Response(400, json={"error": {"message": "unknown field messages"}})
            return httpx.Response(200, json={"tokens": encode(body.get("prompt", body.get("text", "")))})
        if path == "/detokenize":
            shown = decode_all if self.lies.spells_markers else decode
            return httpx.Response(200, json={"text": shown(body["tokens"]).replace(chr(END), "<|end|>")})
        if path in ("/generate", "/v1/chat/completions", "/v1/completions"):
            return self._generation(path, body, request)
        return httpx.Response(404, json={"error": {"message": f"no {path}"}})

    def _info(self) -> dict[str, Any]:
        return {
            "model_path": "/m", "served_model_name": "fake", "speculative_algorithm": self.algorithm,
            "speculative_ddtree_budget": 16, "speculative_dflash_block_size": self.block_size,
            "max_running_requests": self.max_running, "dtype": self.dtype, "context_length": self.context,
            "internal_states": [{"avg_spec_accept_length": self.lies.accept}],
        }  # fmt: skip

    def _metrics(self) -> str:
        if self.kind == "vllm":
            return (
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self._passes}\n'
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self._committed - self._passes}\n'
            )
        return f"ddtree:verify_passes_total {self._passes}\nddtree:committed_tokens_total {self._committed}\n"

    def _generation(self, path: str, body: dict[str, Any], request: httpx.Request) -> httpx.Response:
        lies = self.lies
        native = path == "/generate"
        if native and self.kind == "vllm":
            return httpx.Response(404)
        params = body.get("sampling_params", body)
        limit = params.get("max_new_tokens", params.get("max_tokens", 16))
        if (native and limit == 0) or body.get("prompt_logprobs") is not None:
            return self._score(body, native)
        with self._lock:
            self.seen.append(body)
            self._count += 1
            number = self._count
        if number > lies.dies_after:
            self.dead = True
            raise httpx.ConnectError("connection refused", request=request)
        if number <= lies.cuts_first:
            raise httpx.RemoteProtocolError("peer closed connection", request=request)
        if number <= lies.queue_full_first:
            return httpx.Response(503, json={"error": {"message": "the queue is full"}})
        if lies.always or (lies.fails_every and number % lies.fails_every == 0):
            return httpx.Response(lies.always or 500, json={"error": {"message": "CUBLAS_STATUS_EXECUTION_FAILED"}})
        if lies.hangs_every and number % lies.hangs_every == 0:
            raise httpx.ReadTimeout("timed out", request=request)
        if lies.nonsense:
            return httpx.Response(200, text="<html>busy</html>")
        if body.get("speculative") and self.kind != "ddtree":
            return httpx.Response(400, json={"error": {"message": "unknown field speculative"}})
        endless = bool(lies.trickles_every and number % lies.trickles_every == 0)
        return self._answer(body, params, limit, native, endless)

    def _answer(self, body: dict[str, Any], params: dict[str, Any], limit: int, native: bool, endless: bool) -> httpx.Response:
        prompt = self._prompt_text(body)
        with self._lock:
            self._running += 1
            seen = prompt in self._prompts
            self._prompts.append(prompt)
        time.sleep(0.01)  # requests of a wave must overlap
        given = prompt[-self.lies.window :] if self.lies.window else prompt
        ids, wrong_stream = self._decode(given, body, params, limit + (self.lies.over_by if native else 0))
        if (stop := body.get("stop")) and not self.lies.ignores_stop and (at := decode(ids).find(stop[0])) >= 0:
            ids = ids[: at - (self.lies.stops_early if body.get("stream") else 0)]
        passes = max(1, round((len(ids) - 1) / self.lies.accept))
        with self._lock:
            self._running -= 1
            self._passes += passes
            self._committed += len(ids) - 1
        if self.lies.token_seconds:
            time.sleep(self.lies.token_seconds * len(ids))
        cut = self.lies.kind == "cut" and self._mode(body) in self.lies.modes
        finish = self.lies.calls_all or ("stop" if stop or cut or (ids and ids[-1] == END) else "length")
        meta = self._meta(prompt, ids, passes, finish)
        if self.lies.counts_uncached and seen:
            meta |= {"prompt_tokens": 1, "cached_tokens": len(encode(prompt)) - 1}
        meta |= {"speculative": self._mode(body)} if self.kind == "ddtree" else {}
        if body.get("stream"):
            return httpx.Response(200, content=self._events(ids, meta, passes, native, wrong_stream, endless))
        text = decode(ids).rstrip() if self.lies.trims else decode(ids)
        if native:
            if body.get("return_logprob"):
                meta |= self._output_scores(self._prompt_ids(body), ids)
            return httpx.Response(200, json={"text": text, "output_ids": ids, "meta_info": meta})
        return httpx.Response(200, json=self._openai(text, ids, meta, finish))

    def _meta(self, prompt: str, ids: list[int], passes: int, finish: str) -> dict[str, Any]:
        meta: dict[str, Any] = {"prompt_tokens": len(encode(prompt)), "completion_tokens": len(ids), "cached_tokens": 0,
                                "finish_reason": {"type": finish}}  # fmt: skip
        if not self.lies.no_meta:
            meta |= {"spec_verify_ct": passes, "spec_accept_length": (len(ids) - 1) / passes}
        if not self.lies.no_ids:
            meta["output_ids"] = ids
        return meta

    def _openai(self, text: str, ids: list[int], meta: dict[str, Any], finish: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        if self.lies.reasoning:
            message["reasoning_content"] = "Let me think. "
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
        if self.kind == "vllm":
            choice["token_ids"] = ids
        else:
            choice["meta_info"] = meta
        usage = {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": len(ids)}
        return {"choices": [choice], "usage": usage}

    def _events(
        self, ids: list[int], meta: dict[str, Any], passes: int, native: bool, wrong: str | None, endless: bool
    ) -> Iterator[bytes]:
        step = max(1, round(self.lies.accept))
        sent = 0
        cuts = [1, *range(1 + step, len(ids), step), len(ids)] if len(ids) > 1 else [len(ids)]
        for number, cut in enumerate(cuts):
            last = cut == len(ids)
            piece, sent = decode(ids[sent:cut]), cut
            if wrong is not None and number == 1:
                piece = wrong
            if native:
                counters = meta | {"completion_tokens": cut, "spec_verify_ct": number}
                if self.lies.no_meta:
                    counters.pop("spec_verify_ct")
                yield sse({"text": decode(ids[:cut]), "output_ids": ids[:cut], "meta_info": counters})
            else:
                choice: dict[str, Any] = {"index": 0, "delta": {"content": piece}}
                choice["finish_reason"] = meta["finish_reason"]["type"] if last else None
                if last and self.kind != "vllm":
                    choice["meta_info"] = meta
                if self.kind == "vllm":
                    choice["token_ids"] = ids[cuts[number - 1] if number else 0 : cut]
                yield sse({"choices": [choice]})
        while endless:
            time.sleep(0.05)
            yield sse({"choices": [{"index": 0, "delta": {"content": "x"}}]})
        if not native:
            usage = {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": len(ids)}
            yield sse({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    # ---- the model and its lies

    def _prompt_ids(self, body: dict[str, Any]) -> list[int]:
        return list(body.get("input_ids") or encode(self._prompt_text(body)))

    def _output_scores(self, prompt: list[int], ids: list[int]) -> dict[str, Any]:
        """Scores of generated tokens; the prompt before them came from the cache, which may be damaged."""
        scored = self.score([*prompt, *ids])[len(prompt) :]
        if self.lies.scores_of_next and len(scored) > 1:
            scored = [*scored[1:], (-9.0, scored[0][1])]
        wrong = 3.0 if self.lies.warm_scores_off else 0.0
        return {
            "output_token_logprobs": [[lp - wrong, i, None] for (lp, _), i in zip(scored, ids, strict=True)],
            "output_top_logprobs": [[[p, t, None] for p, t in top] for _, top in scored],
            "cached_tokens": len(prompt),
        }

    def _prompt_text(self, body: dict[str, Any]) -> str:
        if "messages" in body:
            said = body["messages"][-1 if self.lies.forgets_history else 0 :]
            turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in said)
            return turns + ASSISTANT
        if "input_ids" in body:
            return decode(body["input_ids"])
        prompt = body.get("text", body.get("prompt", ""))
        return prompt if isinstance(prompt, str) else decode(prompt)

    def true_answer(self, prompt: str) -> str:
        asked = prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        said = answer_of(asked, prompt)
        return said[:5] + said[6:] if self.lies.wrong_model and len(said) > 8 else said

    def _decode(self, prompt: str, body: dict[str, Any], params: dict[str, Any], limit: int) -> tuple[list[int], str | None]:
        text = self.true_answer(prompt)
        mode = self._mode(body)
        sampled = params.get("temperature", 0) > 0
        lying = (sampled or not self.lies.only_sampled) and self._lies_now(mode)
        kind = self.lies.kind if lying else ""
        wrong_stream: str | None = None
        ids = [*encode(text), END]
        if sampled:
            ids = self._sampled(ids, params, mode)
        elif self.lies.drawn_at_zero:
            ids = self._sampled(ids, {"seed": random.random()}, mode)
        match kind:
            case "garbage":
                ids = [*encode(("(]x;} def q " * (1 + len(text) // 12))[: max(20, len(text))]), END]
            case "typo":
                at = len(text) // 2
                ids = [*encode(text[:at] + ("q" if text[at] != "q" else "z") + text[at + 1 :]), END]
            case "leak":
                ids = [*encode(self._other(prompt) + text), END]
            case "loop":
                ids = encode((text[:20] + "over and over " * limit)[:limit])
            case "decay":
                ids = [*encode(text[: self.lies.after] + "e e e  e" * 40 if len(text) > self.lies.after else text), END]
            case "empty":
                ids = [END]
            case "special":
                ids = [*encode(text[:10] + "<|fim_pad|>" + text[10:]), END]
            case "script":
                ids = [*encode(text[:10] + "的是不" + text[10:]), END]
            case "cut":
                ids = encode(text[: len(text) * 4 // 5])
            case "drop_in_stream":
                wrong_stream = ""
        if self.lies.goes_on and lying and ids[-1] == END:
            ids = [*ids, *encode("Bye."), END]
        return ids if self.lies.ignores_limit else ids[:limit], wrong_stream

    def _mode(self, body: dict[str, Any]) -> str:
        own = {"DDTREE": "tree", "DFLASH": "chain"}.get(self.algorithm, "off")
        return own if self.lies.ignores_mode else str(body.get("speculative") or own)

    def _lies_now(self, mode: str) -> bool:
        lies = self.lies
        with self._lock:
            self._drawn = (self._drawn + 0.6180339887) % 1.0
            if not lies.kind or mode not in lies.modes or self._running < lies.min_batch:
                return False
            if self._drawn >= lies.share or self._lied >= lies.skip + lies.times:
                return False
            self._lied += 1
            return self._lied > lies.skip

    def _sampled(self, ids: list[int], params: dict[str, Any], mode: str) -> list[int]:
        """Above T=0 a line ends in a space with probability 0.5, keyed by (seed, position). `sampled_off`: always."""
        if self.lies.no_noise:
            return ids
        seed = params.get("seed", params.get("sampling_seed")) or random.random()
        seed = 7 if self.lies.one_noise else random.random() if self.lies.ignores_seed else seed
        out: list[int] = []
        for token in ids:
            spaced = random.Random(f"{seed} {len(out)}").random() < 0.5
            if token == 10 and (spaced or (self.lies.sampled_off and mode != "off")):
                out.append(32)
            out.append(token)
        return out

    def _other(self, prompt: str) -> str:
        with self._lock:
            others = [p for p in reversed(self._prompts) if p != prompt]
        marks = [m for p in others for m in re.findall(r"[A-Za-z0-9]{3,8}-[A-Za-z0-9]{2,5}", p)]
        return marks[0] + "\n" if marks else ""

    # ---- scores

    def _score(self, body: dict[str, Any], native: bool) -> httpx.Response:
        lies = self.lies
        if lies.no_scores:
            return httpx.Response(400, json={"error": {"message": "return_logprob is not supported with DDTREE"}})
        ids = body.get("input_ids") or body.get("prompt") or encode(body["text"])
        scored = self.score(ids)
        if not native:
            listed: list[Any] = [None]
            for i in range(1, len(ids)):
                lp, top = scored[i]
                entry = {str(t): {"logprob": p} for p, t in top} | {str(ids[i]): {"logprob": lp}}
                listed.append(entry)
            return httpx.Response(200, json={"choices": [{"index": 0, "text": "", "prompt_logprobs": listed}], "usage": {}})
        start = max(0, body.get("logprob_start_len", 0))
        pairs = [[None if i == 0 else scored[i][0], ids[i], None] for i in range(start, len(ids))]
        tops = [[[p, t, None] for p, t in scored[i][1]] for i in range(start, len(ids))]
        meta = {"input_token_logprobs": pairs, "input_top_logprobs": tops, "cached_tokens": int(lies.cached_scores),
                "prompt_tokens": len(ids), "completion_tokens": 0}  # fmt: skip
        return httpx.Response(200, json={"text": "", "output_ids": [], "meta_info": meta})

    def score(self, ids: list[int]) -> list[tuple[float, list[tuple[float, int]]]]:
        """(log-probability, best two) per position. Inside an answer the right next character is the top one."""
        text = decode_all(ids)
        at = text.rfind(ASSISTANT)
        begin = at + len(ASSISTANT) if at >= 0 else len(ids)
        right = [*encode(self.true_answer(text[:begin])), END] if at >= 0 else []
        followed = True
        spaces = 0
        out: list[tuple[float, list[tuple[float, int]]]] = []
        for i, token in enumerate(ids):
            k = i - begin - spaces
            if self.lies.polluted_scores:
                out.append((-13.5, [(-13.4, token + 1), (-13.5, token)]))
                continue
            if k >= 0 and followed and k < len(right):
                best = right[k]
                if best == 10 and ids[i - 1] != 32:
                    lead = 1.25e-4 if self.lies.drawn_at_zero else 0.0  # within the threshold, beyond rounding
                    even = [(math.log(0.5 + lead), 10), (math.log(0.5 - lead), 32)]
                    followed = token in (10, 32)
                    spaces += token == 32
                    out.append((next((lp for lp, t in even if t == token), -12.0), even))
                    continue
                followed = token == best
                out.append((SURE if followed else -12.0, [(SURE, best), (-12.0, 1)]))
                continue
            known = i > 0 and text[i - 1 : i + 1] in KNOWN_TEXT
            lp = -0.3 if known or k >= 0 else -6.0
            out.append((lp, [(lp, token), (-7.0, 1)]))
        if lies_now := self.lies.wavering_scores and self._every_other():
            out = [(lp - 5.0 * lies_now, top) for lp, top in out]
        return out

    def _every_other(self) -> bool:
        with self._lock:
            self._count += 1
            return self._count % 2 == 0


def answer_of(asked: str, given: str) -> str:
    """The right answer to a curated prompt; `given` is the whole conversation."""
    if asked.startswith("Repeat these ids exactly"):
        return asked.split("\n", 1)[1]
    word = re.search(r"code word (?:is )?(\S+)\.", given)
    if word and asked.endswith(("Reply with the code word only.", "What is the code word?")):
        return word.group(1)
    if found := re.match(r"What is (\d+) ([+-]) (\d+)\?", asked):
        a, b = int(found.group(1)), int(found.group(3))
        return str(a + b if found.group(2) == "+" else a - b)
    if found := re.search(r'keys "name" and "age" for: (\w+), (\d+)', asked):
        return json.dumps({"name": found.group(1), "age": int(found.group(2))})
    if found := re.search(r'city "(\w+)" and unit "(\w)"', asked):
        return json.dumps({"name": "get_weather", "arguments": {"city": found.group(1), "unit": found.group(2)}})
    if found := re.search(r"What is the capital of (\w+)\?", asked):
        return re.search(rf"capital of {found.group(1)} is (\w+)\.", asked).group(1)  # type: ignore[union-attr]
    mark = word if "code word" in asked else None
    names = [n for n in re.findall(r"(\w+)\(", asked) if n in SOLUTIONS]
    code = "\n\n\n".join(SOLUTIONS[n] for n in dict.fromkeys(names))
    head = f"# {mark.group(1)}\n" if mark else ""
    return f"```python\n{head}{code}\n```" if code else ("\n" * 10).join(f"It is said that {asked.lower()}".split())


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def decode(ids: list[int]) -> str:
    return "".join(chr(i) for i in ids if i != END)


def decode_all(ids: list[int]) -> str:
    return "".join(chr(i) for i in ids)


def sse(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
