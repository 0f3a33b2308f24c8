"""SamplingParams in vLLM's names: what is not a field of ours."""

from __future__ import annotations

from outrider.compatibility.rules import NoEffect, Refused, Rules

# fields of ours that vLLM has too; a test holds this to the dataclass
FIELDS = {
    "n": "at most 256",
    "presence_penalty": "",
    "frequency_penalty": "",
    "repetition_penalty": "",
    "temperature": "",
    "top_p": "",
    "top_k": "0 or -1: all",
    "min_p": "",
    "seed": "with it, the same tokens whatever else is computed; -1 is None",
    "stop": "at most 64",
    "stop_token_ids": "",
    "ignore_eos": "",
    "max_tokens": "",
    "min_tokens": "",
    "logprobs": "at most 100; the target's own, before any option",
    "prompt_logprobs": "at most 100",
    "detokenize": "",
    "skip_special_tokens": "",
    "include_stop_str_in_output": "",
    "output_kind": "for LLM.stream and AsyncLLM",
    "structured_outputs": "see below",
    "logit_bias": "",
    "allowed_token_ids": "",
    "bad_words": "texts, or lists of token ids",
    "extra_args": "numbers for sampling filters of your own, by name",
}

STRUCTURED_FIELDS = {
    "json": "a schema, as an object or as text; properties that it does not name are left out",
    "regex": "",
    "choice": "",
    "grammar": "EBNF; its first rule is called root",
    "json_object": "",
    "structural_tag": "as xgrammar has it, without free text",
    "disable_additional_properties": "it is so in any case",
}
STRUCTURED = Rules(
    works={},
    no_effect=[],
    refused=[
        Refused(
            {"disable_any_whitespace": (False,)},
            "one character of whitespace is the most between two parts already: leave it out",
        ),
        Refused({"whitespace_pattern": ()}, "say how many characters at most instead: Guided(max_whitespace=...)"),
        Refused(
            {"backend": ("auto", "xgrammar"), "backend_was_auto": (True, False), "disable_fallback": (True, False)},
            "grammars are matched by xgrammar",
        ),
    ],
)

SAMPLING = Rules(
    works={"guided_decoding": "the older name of structured_outputs"},
    renamed={"guided_decoding": "structured_outputs"},
    no_effect=[
        NoEffect(["spaces_between_special_tokens"], "text is what the tokens spell; no spaces are put in"),
        NoEffect(["skip_clone", "output_text_buffer_length", "stream_interval"], "how vLLM works inside"),
        NoEffect(["length_penalty", "early_stopping"], "only a beam search has a use for them"),
    ],
    refused=[
        Refused({"use_beam_search": (False,)}, "there is no beam search here: use n with a temperature"),
        Refused({"best_of": (1,)}, "answers are not ranked: ask for n and choose"),
        Refused(
            {"logits_processors": ()},
            "no request runs code on logits: use logit_bias, bad_words, or a filter of your own",
        ),
        Refused({"truncate_prompt_tokens": ()}, "prompts are not cut: give the tokens that you want read"),
        Refused(
            {"prompt_logprob_token_ids": (), "prompt_logprob_start": (0,), "logprob_token_ids": ()},
            "log-probabilities are those of the most likely tokens: use logprobs and prompt_logprobs",
        ),
        Refused({"flat_logprobs": (False,)}, "log-probabilities come as one dict for each token"),
        Refused({"skip_reading_prefix_cache": (False,)}, "use LLM(enable_prefix_caching=False)"),
        Refused({"thinking_token_budget": ()}, "reasoning has no budget of its own: use max_tokens"),
        Refused({"repetition_detection": ()}, "repetition does not end an answer: use repetition_penalty"),
        Refused({"watermarking": (False,)}, "there are no watermarks: the text is the target's own"),
        Refused({"routed_experts_prompt_start": (0,)}, "the experts that were used are not reported"),
        Refused({"trace_decode_token_ids": ()}, "an answer cannot be prescribed: use prediction to draft it"),
    ],
)
