"""The contract, as a table: requests that one engine and a pair must answer alike, and where they may differ and why.

`tests/contract` sends each to one engine and, through the router, to a pair; docs/contract.md is drawn from it.
"""

from __future__ import annotations

from contract_case import (
    ADAPTER,
    BOTH,
    CHAT,
    CONTINUOUS,
    FLAT_TOOL,
    IMAGE,
    LONG,
    NAMED,
    PASSAGE,
    RESPONSES,
    SCHEMA,
    TOOL,
    USAGE,
    VLLM,
    Case,
    Differs,
    chat,
    completion,
    ids,
    respond,
    talk,
    text,
    tokens,
    wrong,
)

_COMPLETIONS = (
    completion("completion", tiers=BOTH),
    completion("completion, streamed", tiers=BOTH, stream=True),
    completion("completion, streamed with usage", tiers=BOTH, stream=True, stream_options=USAGE),
    completion("completion, continuous usage", tiers=BOTH, stream=True, stream_options=CONTINUOUS),
    completion("max_tokens 1", tiers=BOTH, max_tokens=1),
    completion("max_tokens 1, streamed", max_tokens=1, stream=True, stream_options=USAGE),
    completion("max_tokens absent", tiers=BOTH, max_tokens=None, ignore_eos=True),
    completion("max_tokens 0", tiers=BOTH, status=400, max_tokens=0),
    completion("max_tokens 0 with echo", tiers=BOTH, max_tokens=0, echo=True),
    completion("max_tokens 0 with echo, streamed", max_tokens=0, echo=True, stream=True, stream_options=USAGE),
    completion("max_tokens 0 with echo and logprobs", tiers=BOTH, max_tokens=0, echo=True, logprobs=1),
    completion("a prompt of one token", tiers=BOTH, prompt=[2001]),
    completion("a prompt of one letter", prompt="a", stream=True, stream_options=USAGE),
    completion("token ids", tiers=BOTH, prompt=ids(1), return_token_ids=True),
    completion("token ids, streamed", prompt=ids(2), return_token_ids=True, stream=True),
    completion("one prompt in a list", prompt=["one in a list " + PASSAGE], stream=True),
    completion("one list of ids in a list", prompt=[ids(3)]),
    completion("several prompts", tiers=BOTH, prompt=["alpha " + PASSAGE, "beta " + PASSAGE], logprobs=1),
    completion("several lists of ids", prompt=[ids(4), ids(5, 7), ids(6, 1)], n=2, temperature=0.8, seed=7),
    completion(
        "several prompts, streamed",
        tiers=BOTH,
        prompt=["gamma " + PASSAGE, "delta " + PASSAGE, "epsilon"],
        stream=True,
        stream_options=USAGE,
    ),
    completion(
        "several prompts, streamed, n and continuous usage",
        prompt=["zeta " + PASSAGE, "eta " + PASSAGE],
        n=2,
        stream=True,
        stream_options=CONTINUOUS,
        temperature=0.8,
        seed=7,
    ),
    completion("several prompts, one of them bad", status=400, prompt=[ids(7), []]),
    completion("n above 1", n=3, temperature=0.8, seed=7),
    completion("n above 1, streamed", n=3, temperature=0.8, seed=7, stream=True, stream_options=USAGE),
    completion("echo", tiers=BOTH, echo=True),
    completion("echo, streamed", echo=True, stream=True, stream_options=USAGE),
    completion("echo with logprobs", tiers=BOTH, prompt="The sky is", echo=True, logprobs=1),
    completion("echo with logprobs, long", tiers=BOTH, echo=True, logprobs=2),
    completion("echo with logprobs, streamed", tiers=BOTH, echo=True, logprobs=1, stream=True, stream_options=USAGE),
    completion("echo with logprobs of token ids", tiers=BOTH, prompt=ids(8), echo=True, logprobs=0),
    completion("echo with logprobs and ids", prompt=ids(9), echo=True, logprobs=1, return_token_ids=True),
    completion("echo with logprobs and ids, streamed", echo=True, logprobs=1, return_token_ids=True, stream=True),
    completion("echo with logprobs, n above 1", echo=True, logprobs=1, n=2, temperature=0.8, seed=7),
    completion("echo with logprobs, several prompts", prompt=["one " + PASSAGE, "two"], echo=True, logprobs=1),
    completion(
        "echo with logprobs, several prompts, streamed",
        prompt=["three " + PASSAGE, "four"],
        echo=True,
        logprobs=1,
        stream=True,
        stream_options=USAGE,
    ),
    completion("logprobs", tiers=BOTH, logprobs=2),
    completion("logprobs, streamed", logprobs=2, stream=True, return_tokens_as_token_ids=True),
    completion("prompt_logprobs", tiers=BOTH, prompt_logprobs=1),
    completion("prompt_logprobs, several prompts", prompt=["five " + PASSAGE, "six"], prompt_logprobs=0),
    completion("prompt_logprobs 0, streamed", prompt_logprobs=0, stream=True),
    completion("prompt_logprobs, streamed", tiers=BOTH, status=400, prompt_logprobs=1, stream=True),
    completion("min_tokens and ignore_eos", tiers=BOTH, min_tokens=12, ignore_eos=True),
    completion("min_tokens above max_tokens", tiers=BOTH, status=400, min_tokens=13),
    completion("seed and penalties", seed=3, temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5, top_p=0.9),
    completion("logit_bias", tiers=BOTH, logit_bias={"2001": 100}, max_tokens=4),
    completion("a suffix", status=400, suffix="end"),
    completion("truncated prompt", truncate_prompt_tokens=9),
    completion("user, priority and an unknown field", user="u", unknown_field={"a": [1]}, priority=0),
    Case(name="the same prompt twice: cached tokens", body=text("cached"), times=2, tiers=BOTH),
    Case(
        name="the same prompt twice, streamed: cached tokens",
        body=text("cached in streams", stream=True, stream_options=USAGE),
        times=2,
        tiers=BOTH,
    ),
    Case(name="a model name left out", body=text("nameless", model=None), tiers=BOTH),
    completion("a JSON object", tiers=VLLM, response_format={"type": "json_object"}, max_tokens=24),
    completion("a choice", tiers=VLLM, structured_outputs={"choice": ["east", "west"]}),
)

_CHATS = (
    talk("chat", tiers=BOTH),
    talk("chat, streamed with usage", tiers=BOTH, stream=True, stream_options=USAGE),
    talk("chat, continuous usage", stream=True, stream_options=CONTINUOUS),
    talk("chat, max_completion_tokens", max_tokens=None, max_completion_tokens=5),
    talk("chat, no limit", max_tokens=None, stop=["."], ignore_eos=False),
    talk("chat, max_tokens 0", status=400, max_tokens=0),
    talk("chat, n above 1", n=3, temperature=0.8, seed=7),
    Case(
        name="chat, n above 1, with a prefix cache",
        route=CHAT,
        body=chat("n and a cache", n=3, temperature=0.8, seed=7),
        tiers=VLLM,
        differs=Differs(
            why="one engine tells of a choice that found the prompt in the cache, where a sibling had just put it; the "
            "prefill engine computes the prompt once, and says so",
            fields=("usage.prompt_tokens_details",),
        ),
    ),
    talk("chat, n above 1, streamed", n=3, temperature=0.8, seed=7, stream=True, stream_options=USAGE),
    talk("chat, logprobs", tiers=BOTH, logprobs=True, top_logprobs=2),
    talk("chat, logprobs, streamed", logprobs=True, top_logprobs=2, stream=True),
    talk("chat, prompt_logprobs", tiers=BOTH, prompt_logprobs=1, max_tokens=4),
    talk("chat, prompt_logprobs, streamed", status=400, prompt_logprobs=1, stream=True),
    talk("chat, token ids", return_token_ids=True),
    talk("chat, token ids, streamed", return_token_ids=True, stream=True),
    talk("chat, prompt text", return_prompt_text=True),
    Case(
        name="chat, echo of the last message",
        route=CHAT,
        body={
            "messages": [{"role": "user", "content": "echo"}, {"role": "assistant", "content": "It is"}],
            "echo": True,
            "max_tokens": 6,
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    talk("chat, content in parts", content=[{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]),
    talk("chat, many bytes to a character", content="Grüße 🚢 von der Fähre ⛴️ 渡し船 " * 8, tiers=BOTH),
    talk("chat, an image where the model takes none", status=400, content=IMAGE, tiers=BOTH),
    talk("chat, no messages", status=400, messages=[]),
    talk("chat, tools offered, none taken", tools=[TOOL], tool_choice="none", tiers=BOTH),
    talk("chat, tools, auto", tiers=VLLM, tools=[TOOL]),
    talk("chat, a tool required", tiers=VLLM, tools=[TOOL], tool_choice="required", max_tokens=48),
    talk(
        "chat, a tool required, streamed", tiers=VLLM, tools=[TOOL], tool_choice="required", max_tokens=48, stream=True
    ),
    talk("chat, a named tool", tiers=VLLM, tools=[TOOL], tool_choice=NAMED, max_tokens=32),
    talk("chat, a named tool, streamed", tiers=VLLM, tools=[TOOL], tool_choice=NAMED, max_tokens=32, stream=True),
    talk(
        "chat, a tool that isn't offered",
        tiers=VLLM,
        status=400,
        tools=[TOOL],
        tool_choice=NAMED | {"function": {"name": "x"}},
    ),
    talk(
        "chat, a schema",
        tiers=VLLM,
        response_format={"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}},
        max_tokens=32,
    ),
    Case(
        name="chat, the same twice: cached tokens",
        route=CHAT,
        body=chat("cached chat", stream=True, stream_options=USAGE),
        times=2,
        tiers=BOTH,
    ),
)

_RESPONSES = (
    respond("response", tiers=BOTH),
    respond("response, streamed", tiers=BOTH, stream=True),
    respond("response, instructions and messages", input=[{"role": "user", "content": "hi"}], instructions="Be brief."),
    respond(
        "response, parts", input=[{"role": "user", "content": [{"type": "input_text", "text": "part"}]}], stream=True
    ),
    respond("response, logprobs", tiers=BOTH, include=["message.output_text.logprobs"], top_logprobs=1),
    respond("response, logprobs, streamed", include=["message.output_text.logprobs"], top_logprobs=1, stream=True),
    respond("response, store and metadata", store=True, metadata={"a": "b"}, user="u"),
    respond("response, tools", tools=[FLAT_TOOL], tool_choice="none"),
    respond("response, a tool required", tiers=VLLM, tools=[FLAT_TOOL], tool_choice="required", max_output_tokens=48),
    respond("response, no input", status=400, input=None, tiers=BOTH),
    Case(
        name="response, the same twice: cached tokens",
        route=RESPONSES,
        body={"input": "cached response " + LONG, "max_output_tokens": 5, "stream": True},
        times=2,
        tiers=BOTH,
    ),
    Case(
        name="response, previous_response_id",
        route=RESPONSES,
        body={"input": "and then?", "previous_response_id": "resp_0"},
        status=404,
        tiers=BOTH,
        differs=Differs(
            why="what a decode engine stored is unknown to the prefill engine, which would compute another prompt; "
            "send the whole conversation as `input`",
            status=501,
            param="previous_response_id",
        ),
    ),
    Case(
        name="response, background",
        route=RESPONSES,
        body={"input": "later", "background": True},
        status=400,
        tiers=BOTH,
        differs=Differs(
            why="nobody would hold the transfer of a request without a connection; engines without a store refuse it "
            "too, with 400",
            status=501,
            param="background",
        ),
    ),
    Case(name="a response that nobody stored", route=RESPONSES + "/resp_0", method="GET", status=404, tiers=BOTH),
    Case(name="cancel of a response that nobody stored", route=RESPONSES + "/resp_0/cancel", status=404, raw=b""),
)

_GENERATE = (
    tokens("generate", 20, {"max_tokens": 8}, tiers=BOTH),
    tokens("generate, streamed with usage", 21, {"max_tokens": 8}, tiers=BOTH, stream=True, stream_options=USAGE),
    tokens("generate, continuous usage", 22, {"max_tokens": 8}, stream=True, stream_options=CONTINUOUS),
    tokens("generate, text", 23, {"max_tokens": 8}, output_mode="text", tiers=BOTH),
    tokens("generate, text, streamed", 24, {"max_tokens": 8, "logprobs": 1}, output_mode="text", stream=True),
    tokens("generate, min_tokens and logprobs", 25, {"max_tokens": 8, "min_tokens": 4, "logprobs": 1}, tiers=BOTH),
    tokens("generate, prompt_logprobs", 26, {"max_tokens": 3, "prompt_logprobs": 1}, tiers=BOTH),
    tokens("generate, n above 1", 27, {"max_tokens": 4, "n": 2, "temperature": 0.8, "seed": 7}),
    tokens("generate, prompt ids back", 28, {"max_tokens": 3}, return_token_ids=True, stream=True),
    tokens("generate, no ids", 29, {"max_tokens": 3}, token_ids=[], status=400, tiers=BOTH),
    tokens("generate, a negative id", 30, {"max_tokens": 3}, token_ids=[5, -1], status=400, tiers=BOTH),
    tokens("generate, sampling_params of the wrong type", 31, "x", status=400),
    tokens("generate, one token", 40, {"max_tokens": 1}, tiers=BOTH),
    tokens("generate, one token, streamed", 41, {"max_tokens": 1, "logprobs": 1}, stream=True, stream_options=USAGE),
    tokens("generate, two tokens", 42, {"max_tokens": 2}, tiers=BOTH),
    tokens("generate, two tokens, streamed", 43, {"max_tokens": 2, "ignore_eos": True}, stream=True),
    tokens("generate, logprobs", 44, {"max_tokens": 5, "logprobs": 2}, tiers=BOTH),
    tokens(
        "generate, logprobs, streamed",
        45,
        {"max_tokens": 5, "logprobs": 1},
        tiers=BOTH,
        stream=True,
        stream_options=CONTINUOUS,
    ),
    tokens("generate, prompt ids back, whole", 46, {"max_tokens": 4}, return_token_ids=True, tiers=BOTH),
    tokens("generate, min_tokens of one", 47, {"max_tokens": 6, "min_tokens": 1}, stream=True, stream_options=USAGE),
    tokens("generate, penalties", 48, {"max_tokens": 8, "repetition_penalty": 1.3, "presence_penalty": 1}, tiers=BOTH),
    tokens("generate, no limit of its own", 49, {"stop_token_ids": list(range(0, 30_000, 7))}, stream=True),
    tokens("generate, up to the model's length", 50, {"max_tokens": 40}, token_ids=ids(50, 60), stream=True),
    tokens("generate, more tokens than the model has", 51, {"max_tokens": 10_000_000}, status=400),
    tokens("generate, one token of a prompt", 52, {"max_tokens": 4}, token_ids=[777], stream=True),
    tokens("generate, min_tokens above max_tokens", 53, {"max_tokens": 4, "min_tokens": 9}, status=400),
    tokens("generate, an id of the client's", 54, {"max_tokens": 4}, request_id="mine", stream=True),
    tokens("generate, too long", 32, {"max_tokens": 3}, token_ids=[7] * 40_000, status=400),
)

_ADAPTERS = (
    completion("an adapter", tiers=VLLM, model=ADAPTER, logprobs=1),
    talk("an adapter, chat, streamed with usage", tiers=VLLM, model=ADAPTER, stream=True, stream_options=USAGE),
    tokens("an adapter, generate", 60, {"max_tokens": 8}, model=ADAPTER, tiers=VLLM),
    # one prompt, asked of the model and of the adapter in turn: neither finds what the other left in the cache
    Case(name="the model, before its adapter", body=text("adapted"), tiers=VLLM),
    Case(name="an adapter, after its model", body=text("adapted", model=ADAPTER), times=2, tiers=VLLM),
    Case(name="the model, after its adapter", body=text("adapted"), tiers=VLLM),
)

_PLAIN = (
    Case(name="tokenize", route="/tokenize", body={"prompt": "Grüße 🚢", "return_token_strs": True}, tiers=BOTH),
    Case(name="tokenize a chat", route="/tokenize", body={"messages": [{"role": "user", "content": "x"}]}, tiers=BOTH),
    Case(name="detokenize", route="/detokenize", body={"tokens": ids(40, 9)}, tiers=BOTH),
    Case(
        name="detokenize, out of range",
        route="/detokenize",
        body={"tokens": [99_999_999]},
        status=400,
        rendered=Differs(
            why="vLLM's tokenizer knows no text for such an id and gives none; the simulated engine refuses it",
            fields=("",),
            status=200,
        ),
    ),
    Case(name="models", route="/v1/models", method="GET", tiers=BOTH),
    Case(name="version", route="/version", method="GET", tiers=BOTH),
    Case(name="ping", route="/ping", method="GET", tiers=BOTH),
    Case(name="ping, posted", route="/ping", raw=b"", tiers=BOTH),
    Case(
        name="health",
        route="/health",
        method="GET",
        tiers=BOTH,
        differs=Differs(why="the router's own: it lists the engines and what each lacks", fields=("",)),
    ),
)

_ERRORS = (
    wrong("a model that isn't served", model="nope", status=404),
    wrong("a chat with a model that isn't served", CHAT, model="nope", status=404),
    wrong("a model name that is a number", model=5),
    wrong("an empty prompt", prompt=""),
    wrong("no prompt", prompt=None),
    wrong("an empty list of prompts", prompt=[], tiers=("sim",)),
    wrong("a prompt of the wrong type", prompt={"a": 1}),
    wrong("a prompt longer than the model", prompt=[7] * 40_000, max_tokens=5),
    wrong("a chat longer than the model", CHAT, messages=[{"role": "user", "content": "word " * 40_000}], max_tokens=9),
    wrong("more output than the model's length", max_tokens=10_000_000),
    wrong("max_tokens of the wrong type", max_tokens="many"),
    wrong("several fields of the wrong type", max_tokens="many", n="x", stop=5, tiers=VLLM),
    wrong("a temperature below zero", temperature=-1),
    wrong("top_p above one", top_p=1.5),
    wrong("n of zero", n=0),
    wrong("n with greedy sampling", n=2, temperature=0, tiers=("sim",)),
    wrong("stream_options without a stream", stream_options=USAGE),
    wrong("top_logprobs without logprobs", CHAT, top_logprobs=2),
    wrong("prompt_logprobs below zero", prompt_logprobs=-7),
    wrong("logprobs of the wrong type", logprobs="x"),
    wrong("an empty stop string", stop=[""], tiers=("sim",)),
    wrong("a token id beyond the vocabulary", prompt=[1, 99_999_999]),
    wrong("messages of the wrong type", CHAT, messages="hi"),
    Case(name="JSON that ends early", raw=b'{"model": "x", "prompt": "a"', status=400, tiers=BOTH),
    Case(name="an empty body", raw=b"", status=400, tiers=BOTH),
    Case(name="a list for a body", raw=b"[1]", status=400, tiers=BOTH),
    Case(
        name="bytes that are no text",
        raw=b"\xff\xfe\x00",
        status=400,
        differs=Differs(
            why="an engine might read UTF-16 out of it, and transfer parameters in that: the router refuses it itself",
            fields=("",),
            status=400,
        ),
    ),
    Case(
        name="another content type",
        body=text("content type"),
        headers={"Content-Type": "text/plain"},
        status=400,
        tiers=BOTH,
    ),
    Case(name="an empty chat", route=CHAT, raw=b"{}", status=400, tiers=BOTH),
    Case(name="a body of 10 MB", body=text("10 MB", prompt="ferry " * 1_700_000), status=400, tiers=BOTH),
    Case(name="headers of 100 KB", body=text("headers"), headers={"X-Long": "x" * 100_000}),
    Case(
        name="a wrong method",
        method="GET",
        status=405,
        tiers=BOTH,
        differs=Differs(
            why="the status and `Allow` are one engine's, the body is the router's typed error",
            fields=("",),
            status=405,
        ),
    ),
    Case(
        name="no such route",
        route="/v1/nope",
        raw=b"{}",
        status=404,
        tiers=BOTH,
        differs=Differs(
            why="a route that no pair serves is refused by name and never computed by one engine alone", status=501
        ),
    ),
    Case(
        name="beam search",
        body=text("beams", use_beam_search=True),
        status=501,
        differs=Differs(
            why="the engine would compute the prompt again for each beam on the decode side",
            status=501,
            param="use_beam_search",
            fields=("",),
        ),
    ),
    Case(
        name="prompt embeddings",
        body=text("embeddings", prompt_embeds="AAAA"),
        status=400,
        tiers=BOTH,
        differs=Differs(
            why="the transfer checks that both sides have the same prompt by its token ids, which there are none of",
            status=501,
            param="prompt_embeds",
        ),
    ),
)

STOPS = (
    completion("a stop token", stop_token_ids=["<token 3>"]),
    completion("the first token is a stop token", stop_token_ids=["<token 0>"], tiers=BOTH),
    completion(
        "the first token is a stop token, streamed", stop_token_ids=["<token 0>"], stream=True, stream_options=USAGE
    ),
    completion(
        "the first token is a stop token and shown", stop_token_ids=["<token 0>"], include_stop_str_in_output=True
    ),
    completion("a stop string", stop=["<text 2>"], tiers=BOTH),
    completion("a stop string, shown", stop=["<text 2>"], include_stop_str_in_output=True),
    completion("a stop string, streamed", stop=["<text 2>", "never"], stream=True, tiers=BOTH),
    completion("a stop string below min_tokens", stop=["<text 1>"], min_tokens=6),
    talk("chat, a stop string", stop=["<text 2>"], ignore_eos=True, stream=True, stream_options=USAGE),
    talk("chat, the first token is a stop token", stop_token_ids=["<token 0>"], tiers=BOTH),
    tokens("generate, the first token is a stop token", 33, {"max_tokens": 8, "stop_token_ids": ["<token 0>"]}),
    tokens(
        "generate, the first token is a stop token, streamed",
        55,
        {"max_tokens": 8, "stop_token_ids": ["<token 0>"], "logprobs": 1},
        stream=True,
        stream_options=CONTINUOUS,
    ),
    tokens(
        "generate, the first token is a stop token, ids back",
        56,
        {"max_tokens": 8, "stop_token_ids": ["<token 0>"]},
        stream=True,
        return_token_ids=True,
    ),
    tokens("generate, the second token is a stop token", 57, {"max_tokens": 8, "stop_token_ids": ["<token 1>"]}),
    tokens(
        "generate, a stop token too early",
        58,
        {"max_tokens": 8, "min_tokens": 1, "stop_token_ids": ["<token 0>", "<token 2>"]},
        stream=True,
        stream_options=USAGE,
    ),
    tokens("generate, a stop string", 34, {"max_tokens": 8, "stop": ["<text 2>"]}, output_mode="text", stream=True),
)
"""`<token N>` and `<text N>` stand for the Nth token of the answer without a stop, which one engine is asked first."""

CASES: tuple[Case, ...] = (*_COMPLETIONS, *_CHATS, *_RESPONSES, *_GENERATE, *_ADAPTERS, *_PLAIN, *_ERRORS, *STOPS)

GENERAL = (
    (
        "A reply of the pair has `x-kvferry-transfer-id`, and `X-Request-Id` where the client sent one.",
        "To find the request in logs and stories.",
        "tests/contract/test_sim.py",
    ),
    (
        "`prompt_tokens_details` of a follow-up that repeats an answer counts less.",
        "The number is the prefill engine's, which has the prompt's KV and never had the answer's.",
        "tests/contract/test_sim.py",
    ),
    (
        "`prompt_tokens_details` of several prompts is their sum.",
        "vLLM gives the number of one of its prompts: the last one, or of a stream the first to come.",
        "tests/contract/test_vllm.py",
    ),
    (
        "The events of several prompts begin when each has its first token.",
        "Until then any of them can still fail, and its error is the client's.",
        "tests/integration/router/test_router_prompts.py",
    ),
    (
        "A stream that breaks after its first token ends in one error event, without `[DONE]`.",
        "It names the side and the peer; nothing is sent twice.",
        "tests/integration/router/test_router_streams.py",
    ),
    (
        "`kv_transfer_params` of the client are dropped, those of the engines are null in replies.",
        "They name peers and addresses; only the router may.",
        "tests/integration/router/test_router_requests.py",
    ),
    (
        "A body above `--max-body-mib` is refused with 413.",
        "A limit of memory; one engine has none.",
        "tests/integration/router/test_router_requests.py",
    ),
    (
        "A refusal by pull through vLLM's own connector, or with a late `--bind`, may name 1 as the number of output "
        "tokens.",
        "It is P's, which is asked for one; elsewhere D, asked as the client asked, says it first.",
        "tests/integration/router/test_router_failures.py",
    ),
    (
        "A client without a key is served where the router has the engines' (`--api-key`).",
        "The key is the router's then; a client's own key goes before it, and to both engines.",
        "tests/integration/router/test_router_requests.py",
    ),
    (
        "`/health`, `/metrics` and `/v1/models` are the router's own.",
        "Models are those that both sides serve.",
        "tests/integration/router/test_router_routes.py",
    ),
    (
        "Routes that steer an engine (`/pause`, `/sleep`, `/v1/load_lora_adapter` and the like) are refused.",
        "They would reach one engine of several.",
        "tests/integration/router/test_router_routes.py",
    ),
    (
        "vLLM's NixlPushConnector: `/v1/responses` is refused with 501; with either of its connectors `n` above 1 is.",
        "Those connectors pair by the request id, once.",
        "tests/integration/router/test_router_dialects.py",
    ),
)
"""What holds for every request: (difference, reason, where it is tested)."""

RENDERED = (
    (
        "What a refusal of a completions, chat or responses request says, on simulated engines.",
        "It is the tier's, in vLLM's words; a simulated engine has its own. Status and shape are equal.",
        "tests/contract/test_render.py",
    ),
    (
        "`prompt_tokens_details` of a stream that decode computed without a prefill engine is left out.",
        "An engine tells it at the end of its stream of tokens; vLLM's frontend takes it from the beginning.",
        "tests/integration/router/test_router_render.py",
    ),
    (
        "An answer that is not streamed and has stop strings is not tried again once decode had begun it.",
        "Tokens go to the tier as they are made, so that a stop string ends decode's work at once.",
        "tests/integration/router/test_router_render.py",
    ),
    (
        "Without a render worker: 503 `render_unavailable`, or with `--render-fallback engines` as without a tier.",
        "Engines may have been started without a tokenizer.",
        "tests/integration/router/test_router_render.py",
    ),
)
"""What a render tier changes, as above."""
