"""Fields of requests to OpenAI and to vLLM's server that are none of ours: those without effect, and those refused."""

from __future__ import annotations

from outrider.compatibility.rules import NoEffect, Refused, Rules

_ONE_ANSWER = "answers are not ranked: ask for n and choose"
_NO_BEAM = "there is no beam search here: use n with a temperature"
_TEXT_ONLY = "answers are text"

_IDLE = [
    NoEffect(["metadata", "store"], "nothing is stored, neither requests nor answers"),
    NoEffect(["user", "safety_identifier", "service_tier", "priority"], "all requests of a server are equal"),
    NoEffect(["prompt_cache_key", "prompt_cache_retention"], "prefixes are found by their tokens; see cache_salt"),
    NoEffect(["verbosity"], "no template knows it: say in the prompt how long the answer is to be"),
    NoEffect(["spaces_between_special_tokens"], "text is what the tokens spell; no spaces are put in"),
    NoEffect(["guided_decoding_backend"], "grammars are matched by xgrammar"),
    NoEffect(["length_penalty", "early_stopping"], "only a beam search has a use for them"),
]
_MISSING = [
    Refused({"use_beam_search": (False,)}, _NO_BEAM),
    Refused({"best_of": (1,)}, _ONE_ANSWER),
    Refused({"detokenize": (True,)}, "answers are text: return_token_ids adds their tokens"),
    Refused({"logits_processors": ()}, "no code runs on logits: use logit_bias, bad_words or structured_outputs"),
    Refused({"guided_whitespace_pattern": ()}, "say how many characters at most instead: guided_max_whitespace"),
    Refused({"return_tokens_as_token_ids": (False,)}, "return_token_ids gives the tokens beside their texts"),
    Refused({"vllm_xargs": ()}, "filters of your own are asked for in Python: SamplingParams(extra_args=...)"),
    Refused({"kv_transfer_params": ()}, "there are no plugins that could read it"),
    Refused({"thinking_token_budget": ()}, "reasoning has no budget of its own: use max_tokens"),
]

EVERY = Rules(works={}, no_effect=_IDLE, refused=_MISSING)
CHAT = Rules(
    works={},
    no_effect=_IDLE,
    refused=[
        *_MISSING,
        Refused({"functions": (), "function_call": ("none",)}, "use tools and tool_choice, their successors"),
        Refused({"audio": (), "modalities": lambda given: given == ["text"]}, _TEXT_ONLY),
        Refused({"web_search_options": ()}, "nothing is fetched: search with a tool of your own"),
        Refused({"chat_template": ()}, "a template is code: give it to the server, with --chat-template"),
        Refused({"documents": ()}, "put documents into messages"),
        Refused({"mm_processor_kwargs": ()}, "images are prepared as the checkpoint's own processor says"),
        Refused({"echo": (False,)}, "only completions begin with their prompt"),
        Refused({"add_special_tokens": (False,)}, "the chat template writes all special tokens"),
        Refused({"include_reasoning": (True,)}, "reasoning is always beside the content: leave it unread"),
    ],
)
COMPLETION = Rules(
    works={},
    no_effect=_IDLE,
    refused=[
        *_MISSING,
        Refused({"suffix": ()}, "a text cannot be filled in before a given end: write that into the prompt"),
        Refused({"prompt_embeds": ()}, "prompts are text or token ids"),
    ],
)
RESPONSE = Rules(
    works={},
    no_effect=[
        *_IDLE,
        NoEffect(["include", "context_management"], "what there is to say is always said"),
        NoEffect(["truncation"], "a conversation is never cut; see truncate_prompt_tokens"),
        NoEffect(["max_tool_calls"], "tools are yours: the server calls none"),
    ],
    refused=[
        Refused(
            {"previous_response_id": (), "conversation": ()},
            "nothing is stored: send the whole conversation as input, the model's own output items included",
        ),
        Refused({"background": (False,)}, "nothing is stored: an answer goes to whoever waits for it"),
        Refused({"prompt": ()}, "no prompts are stored: send it as instructions and input"),
        *_MISSING,
    ],
)
