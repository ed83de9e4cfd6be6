// Repairs what clients send as a chat's history. They send it again with every turn, so that refusing one bad item would
// end a conversation.

#pragma once

#include <string>

#include "server-common.h"
#include "server-task.h"

namespace towerd::wire {

// Text that is nearly JSON as JSON: without a byte-order mark, and with U+FFFD for each escaped half of a surrogate pair.
std::string mended_json(std::string text);

// Arguments of a call, as JSON of an object: `{}` for a blank text, and an object with the text as `arguments` for one that
// is no object, unless the template `takes_text`.
std::string mended_arguments(const std::string & text, bool takes_text);

// Repairs a chat body of any API, and leaves out the line that Claude Code puts before its instructions for Anthropic's
// billing, which is another one in each session. A body that is wrong in another way is
// left to llama.cpp, which says what is wrong with it. Arguments that are a text are left as they are.
void mend_history(task_response_type type, json & body);

}  // namespace towerd::wire
