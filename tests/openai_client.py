"""Talks to a server through the `openai` package, as any user's program would, and checks the answers.

  openai_client.py PORT MODEL   prints one line per check; exit status 1 on the first that fails, 77 without
                                the package
"""
import struct
import sys

try:
    import openai
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(77)

port, model = int(sys.argv[1]), sys.argv[2]
client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
prompt = [11, 22, 33, 44, 55]


def check(story, holds):
    print(("ok   " if holds else "FAIL ") + story, flush=True)
    if not holds:
        sys.exit(1)


check("models.list names the model", [m.id for m in client.models.list().data] == [model])

whole = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=1.0, seed=7, logprobs=3,
                                  extra_body={"ignore_eos": True, "return_token_ids": True, "return_logprob_bits": True})
choice = whole.choices[0]
check("usage counts exactly", (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12))
check("finish reason", choice.finish_reason == "length")
check("logprobs have one entry a token", len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == 12)
bits = choice.model_extra["tare"]["raw_logprob_bits"]
check("the printed logprobs are the bits",
      [struct.unpack("<I", struct.pack("<f", x))[0] for x in choice.logprobs.token_logprobs] == [int(b, 16) for b in bits])

text, ids, usage, finish = "", [], None, None
for chunk in client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=1.0, seed=7, stream=True,
                                       stream_options={"include_usage": True},
                                       extra_body={"ignore_eos": True, "return_token_ids": True}):
    if not chunk.choices:
        usage = chunk.usage
        continue
    text += chunk.choices[0].text
    ids += chunk.choices[0].model_extra["token_ids"]
    finish = chunk.choices[0].finish_reason or finish
check("streamed text is the whole text", text == choice.text)
check("streamed ids are the whole ids", ids == choice.model_extra["token_ids"])
check("streamed usage and finish", usage.completion_tokens == 12 and finish == "length")

many = client.completions.create(model=model, prompt=[prompt, prompt + [66]], n=3, max_tokens=4, seed=1,
                                 extra_body={"ignore_eos": True})
check("two prompts of three samples are six choices", [c.index for c in many.choices] == list(range(6)))
again = client.completions.create(model=model, prompt=[prompt, prompt + [66]], n=3, max_tokens=4, seed=1,
                                  extra_body={"ignore_eos": True})
check("a seed repeats", [c.text for c in again.choices] == [c.text for c in many.choices])

try:
    client.completions.create(model=model, prompt=prompt, temperature=-1)
    check("a negative temperature is refused", False)
except openai.BadRequestError as error:
    check("a refusal names the field", error.param == "temperature" and error.status_code == 400)
try:
    client.completions.create(model="other", prompt=prompt)
    check("another model is refused", False)
except openai.NotFoundError as error:
    check("another model is not found", error.param == "model")
try:
    client.completions.create(model=model, prompt=prompt, frequency_penalty=0.5)
    check("what is not built is refused", False)
except openai.BadRequestError as error:
    check("what is not built is named", error.param == "frequency_penalty")

try:
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Say hello."}],
                                            max_tokens=8, temperature=0, logprobs=True, top_logprobs=2)
except openai.BadRequestError as error:
    check("a model without a chat template says how to go on", "token" in str(error))
    sys.exit(0)
message = answer.choices[0].message
check("chat answers as the assistant", message.role == "assistant" and len(message.content) > 0)
content = answer.choices[0].logprobs.content
check("chat logprobs", len(content) == answer.usage.completion_tokens and all(len(t.top_logprobs) == 2 for t in content))
check("greedy takes the most likely", all(t.token == t.top_logprobs[0].token for t in content))
pieces, role = "", None
for chunk in client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Say hello."}],
                                            max_tokens=8, temperature=0, stream=True):
    delta = chunk.choices[0].delta
    role = role or delta.role
    pieces += delta.content or ""
check("streamed chat is the whole chat", pieces == message.content and role == "assistant")
