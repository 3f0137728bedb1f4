/* Any strings as a conversation: rendering ends with text or a named refusal, twice the same; what is
 * rendered ends with the generation prompt, and a user turn's text stands in it trimmed. */
#include "fuzz.h"

#include "error.h"
#include "qx.h"

#define MAX_MESSAGES 8

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool", "robot", NULL};
    static const char *const efforts[] = {NULL, "low", "medium", "xhigh", "high"};
    struct qx_message m[MAX_MESSAGES];
    struct qx_tool_call calls[MAX_MESSAGES];
    const char *tools[2] = {NULL, NULL};
    struct qx_chat_opts o = {0};
    size_t n = 0, i = 2;
    if (size < 2) {
        return 0;
    }
    char *text = malloc(size + 1);
    CHECK(text);
    memcpy(text, data, size);
    text[size] = '\0';
    o.no_thinking = data[0] & 1;
    o.forget_thinking = data[0] & 2;
    o.no_generation_prompt = data[0] & 4;
    o.effort = efforts[(data[0] >> 3) % 5];
    memset(m, 0, sizeof m);
    memset(calls, 0, sizeof calls);
    if (data[1] & 1) {
        o.template_text = text + i;
        i += strlen(text + i) + 1;
    }
    if (data[1] & 2 && i < size) {
        tools[0] = text + i;
        o.tools = tools;
        o.n_tools = 1;
        i += strlen(text + i) + 1;
    }
    /* A message: a byte that says its kind, its content, and for a call its arguments. */
    while (i < size && n < MAX_MESSAGES) {
        uint8_t kind = data[i++];
        m[n].role = roles[kind % 6];
        if (i < size) {
            m[n].content = text + i;
            i += strlen(text + i) + 1;
        }
        if (kind & 0x40 && i < size) {
            calls[n] = (struct qx_tool_call){kind & 0x20 ? NULL : "f", text + i};
            m[n].calls = &calls[n];
            m[n].n_calls = 1;
            i += strlen(text + i) + 1;
        }
        if (kind & 0x80 && i < size) {
            m[n].reasoning = text + i;
            i += strlen(text + i) + 1;
        }
        n++;
    }
    char *out = NULL, *again = NULL;
    size_t len = 0, len_again = 0;
    struct qx_error err = {0};
    int rc = qx_chat_render(m, n, &o, &out, &len, &err);
    int rc_again = qx_chat_render(m, n, &o, &again, &len_again, NULL);
    CHECK(rc == rc_again && len == len_again);
    if (rc == 0) {
        static const char with[] = "<|im_start|>assistant\n<think>\n",
                          without[] = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
        const char *end = o.no_thinking ? without : with;
        CHECK(out && strlen(out) == len && !memcmp(out, again, len));
        CHECK(strncmp(out, "<|im_start|>", 12) == 0);
        if (!o.no_generation_prompt) {
            CHECK(len >= strlen(end) && !strcmp(out + len - strlen(end), end));
        }
    } else {
        CHECK(!out && !again && len == 0);
        CHECK(!strcmp(err.kind, "chat") || !strcmp(err.kind, "chat-tools"));
    }
    qx_text_free(out);
    qx_text_free(again);
    free(text);
    CHECK(qx_alloc_live() == 0);
    return 0;
}
