// Checks JSON schemas before llama.cpp makes grammars of them. It follows the paths of common/json-schema.cpp and
// common/json-schema-to-grammar.cpp, and counts its steps.

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "bounds.h"
#include "fields.h"
#include "refused.h"

namespace towerd::wire {

namespace {

[[noreturn]] void too_large(const char * what, size_t max) {
    refuse(std::string("JSON schema: more than ") + std::to_string(max) + " " + what);
}

class SchemaWalk {
public:
    explicit SchemaWalk(const json & root) : root_(root) {}

    // `nodes` counts over several schemas.
    void run(size_t & nodes) {
        walk(root_, 0);
        nodes += nodes_;
    }

private:
    void walk(const json & schema, size_t name_bytes) {
        if (++nodes_ > bounds::kSchemaNodesMax) {
            too_large("nodes as it is written out", bounds::kSchemaNodesMax);
        }
        if (name_bytes > bounds::kSchemaNameBytesMax) {
            too_large("bytes of property names around a value", bounds::kSchemaNameBytesMax);
        }
        if (!schema.is_object()) {
            return;
        }
        std::vector<const json *> path;
        count_alternatives(schema, path);
        if (schema.contains("$ref")) {
            walk_ref(schema.at("$ref"));
            return;
        }
        // Several types are written out as one copy of the schema for each.
        const bool   many = has_array(schema, "type");
        const size_t n    = many ? std::max<size_t>(1, schema.at("type").size()) : 1;
        for (size_t i = 0; i < n; ++i) {
            walk_children(schema, name_bytes + (many ? 4 : 0));
        }
    }

    void walk_ref(const json & value) {
        if (!value.is_string()) {
            return;
        }
        const std::string ref = value.get<std::string>();
        if (ref.size() > bounds::kSchemaNameBytesMax) {
            too_large("bytes in a $ref", bounds::kSchemaNameBytesMax);
        }
        const json * target = resolved(ref);
        if (target == nullptr || !refs_.insert(ref).second) {
            return;
        }
        if (refs_.size() > bounds::kSchemaRefsMax) {
            too_large("different $ref", bounds::kSchemaRefsMax);
        }
        end_of_chain(target);
        walk(*target, ref.size());
    }

    static void check_pattern(const std::string & pattern) {
        if (pattern.size() > bounds::kSchemaPatternBytesMax) {
            too_large("bytes in a pattern", bounds::kSchemaPatternBytesMax);
        }
        int  depth    = 0;
        bool in_class = false;
        for (size_t i = 0; i < pattern.size(); ++i) {
            switch (pattern[i]) {
                case '\\': ++i; break;
                case '[': in_class = true; break;
                case ']': in_class = false; break;
                case '(': depth += in_class ? 0 : 1; break;
                case ')': depth -= in_class ? 0 : 1; break;
                default: break;
            }
            if (depth > bounds::kSchemaPatternDepthMax) {
                too_large("levels in a pattern", bounds::kSchemaPatternDepthMax);
            }
        }
    }

    void walk_children(const json & schema, size_t name_bytes) {
        if (has_text(schema, "pattern")) {
            check_pattern(text_in(schema, "pattern"));
        }
        if (has_array(schema, "enum")) {
            nodes_ += schema.at("enum").size();
        }
        for (const char * key : {"oneOf", "anyOf", "allOf", "items", "prefixItems"}) {
            if (!schema.contains(key)) {
                continue;
            }
            const json & value = schema.at(key);
            if (!value.is_array()) {
                walk(value, name_bytes + 5);
                continue;
            }
            for (const auto & child : value) {
                walk(child, name_bytes + 16);
            }
        }
        if (has_object(schema, "properties")) {
            for (const auto & [name, child] : schema.at("properties").items()) {
                walk(child, name_bytes + name.size() + 1);
            }
        }
        if (schema.contains("additionalProperties")) {
            walk(schema.at("additionalProperties"), name_bytes + 17);
        }
        check_optional(schema);
    }

    void check_optional(const json & schema) {
        size_t n = optional_of(schema, true);
        if (has_array(schema, "allOf")) {
            for (const auto & child : schema.at("allOf")) {
                for (const char * key : {"oneOf", "anyOf"}) {
                    if (has_array(child, key)) {
                        for (const auto & alternative : child.at(key)) {
                            n += optional_of(alternative, false);
                        }
                    }
                }
            }
        }
        if (n > bounds::kSchemaOptionalMax) {
            too_large("optional properties in an object", bounds::kSchemaOptionalMax);
        }
    }

    size_t optional_of(const json & schema, bool may_require) {
        const json * object = &schema;
        if (object->is_object() && object->contains("$ref") && !may_require) {
            object = end_of_chain(object);
        }
        if (object == nullptr || !has_object(*object, "properties")) {
            return 0;
        }
        std::set<std::string> required;
        if (may_require && has_array(*object, "required")) {
            for (const auto & name : object->at("required")) {
                if (name.is_string()) {
                    required.insert(name.get<std::string>());
                }
            }
        }
        size_t n = object->contains("additionalProperties") ? 1 : 0;
        for (const auto & [name, child] : object->at("properties").items()) {
            (void) child;
            n += required.count(name) == 0 ? 1 : 0;
        }
        return n;
    }

    // The end of a chain of references; llama.cpp follows a cycle forever.
    const json * end_of_chain(const json * schema) {
        for (size_t i = 0; i <= bounds::kSchemaRefsMax; ++i) {
            if (schema == nullptr || !schema->is_object() || !schema->contains("$ref")) {
                return schema;
            }
            schema = has_text(*schema, "$ref") ? resolved(text_in(*schema, "$ref")) : nullptr;
        }
        refuse("JSON schema: a $ref leads back to itself");
    }

    const json * resolved(const std::string & ref) const {
        if (ref.compare(0, 2, "#/") != 0) {
            return nullptr;
        }
        const json * target = &root_;
        for (const auto & key : string_split(ref.substr(2), "/")) {
            if (target->is_object() && target->contains(key)) {
                target = &target->at(key);
            } else if (target->is_array() && !key.empty() &&
                       key.find_first_not_of("0123456789") == std::string::npos && key.size() < 10 &&
                       std::stoull(key) < target->size()) {
                target = &target->at(std::stoull(key));
            } else {
                return nullptr;
            }
        }
        return target;
    }

    // llama.cpp asks for the types of a value on every path through its alternatives.
    void count_alternatives(const json & schema, std::vector<const json *> & path) {
        if (++steps_ > bounds::kSchemaStepsMax) {
            too_large("ways through its alternatives", bounds::kSchemaStepsMax);
        }
        if (!schema.is_object()) {
            return;
        }
        if (schema.contains("$ref")) {
            const json * target = has_text(schema, "$ref") ? resolved(text_in(schema, "$ref")) : nullptr;
            if (target == nullptr || std::find(path.begin(), path.end(), target) != path.end()) {
                return;
            }
            if (path.size() >= bounds::kDepthMax) {
                too_large("references in a row", bounds::kDepthMax);
            }
            path.push_back(target);
            count_alternatives(*target, path);
            path.pop_back();
            return;
        }
        for (const char * key : {"oneOf", "anyOf", "allOf"}) {
            if (has_array(schema, key)) {
                for (const auto & child : schema.at(key)) {
                    count_alternatives(child, path);
                }
            }
        }
    }

    const json &          root_;
    std::set<std::string> refs_;
    size_t                nodes_ = 0;
    size_t                steps_ = 0;
};

}  // namespace

void check_schema(const json & schema) {
    size_t nodes = 0;
    SchemaWalk(schema).run(nodes);
}

void check_tools(const json & tools) {
    if (!tools.is_array()) {
        return;
    }
    size_t nodes = 0;
    for (const auto & tool : tools) {
        if (!has_object(tool, "function")) {
            continue;
        }
        const json & function = tool.at("function");
        if (text_in(function, "name").size() > bounds::kSchemaNameBytesMax) {
            refuse("Field 'tools': a name has more than " + std::to_string(bounds::kSchemaNameBytesMax) + " bytes");
        }
        if (function.contains("parameters")) {
            SchemaWalk(function.at("parameters")).run(nodes);
        }
        if (nodes > bounds::kToolNodesMax) {
            refuse("Field 'tools': schemas of more than " + std::to_string(bounds::kToolNodesMax) + " nodes together");
        }
    }
}

}  // namespace towerd::wire
