// The fields of a client's JSON, which may have any shape.

#pragma once

#include <string>

#include "server-common.h"

namespace towerd::wire {

inline bool has_text(const json & object, const char * key) {
    return object.is_object() && object.contains(key) && object.at(key).is_string();
}

inline bool has_array(const json & object, const char * key) {
    return object.is_object() && object.contains(key) && object.at(key).is_array();
}

inline bool has_object(const json & object, const char * key) {
    return object.is_object() && object.contains(key) && object.at(key).is_object();
}

// Of an object.
inline bool is_missing(const json & object, const char * key) {
    return !object.contains(key) || object.at(key).is_null();
}

inline std::string text_in(const json & object, const char * key) {
    return has_text(object, key) ? object.at(key).get<std::string>() : std::string();
}

inline bool is_assistant(const json & message) {
    return text_in(message, "role") == "assistant";
}

inline bool is_system(const json & message) {
    const std::string role = text_in(message, "role");
    return role == "system" || role == "developer";
}

}  // namespace towerd::wire
