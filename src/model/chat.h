/* SPDX-License-Identifier: Apache-2.0 */
/* Chat formats, built in per family: ChatML (Qwen3), Llama-3 headers, Gemma turns.
 *
 * Which one a model has is found from the template in its tokenizer_config.json, by fragments that
 * only that format has. An unknown template is refused for chat, never guessed; so is Llama 3.1's
 * and 3.2's own, which writes dates into the system turn. ChatML comes in two forms, a plain one
 * and Qwen3's, which keeps or drops the thoughts of assistant turns as its template does.
 */
#ifndef MODEL_CHAT_H
#define MODEL_CHAT_H

#include <stdbool.h>
#include <stddef.h>

#include <baton/error.h>

struct model_chat;
struct model_message {
    const char *role; /* system, user, assistant */
    const char *content;
};

/* Read DIR/tokenizer_config.json. BATON_ERR_UNSUPPORTED where there is no template or one we do
 * not know. */
int model_chat_open(const char *dir, struct model_chat **out, struct baton_error *e);
void model_chat_close(struct model_chat *c);             /* NULL is fine */
const char *model_chat_name(const struct model_chat *c); /* "chatml", "llama3", "gemma" */

/* Render messages exactly as the folder's own template does. add_generation ends with the header
 * of the assistant's turn; think false adds Qwen3's empty think block there (ignored by others).
 * The text holds the start token where the format has one: encode it without special tokens. */
int model_chat_render(const struct model_chat *c, const struct model_message *messages, size_t n,
                      bool add_generation, bool think, char **text, struct baton_error *e);

#endif
