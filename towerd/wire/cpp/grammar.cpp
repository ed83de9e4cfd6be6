// Checks GBNF grammars before llama.cpp's sampler gets them: some make it recurse, allocate or search without end.
// The text is read as src/llama-grammar.cpp reads it; the rules come from the parser there.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bounds.h"
#include "llama-grammar.h"
#include "refused.h"

namespace towerd::wire {

namespace {

// llama-server's message for an invalid grammar.
constexpr const char * kRefusal = "Failed to initialize samplers: failed to parse grammar";

[[noreturn]] void too_large(const char * what, size_t max) {
    refuse(std::string(kRefusal) + ": more than " + std::to_string(max) + " " + what);
}

// Limits the parser's work: how deep it recurses and how much it writes out.
class TextScan {
public:
    explicit TextScan(const char * text) : at_(text) {}

    void run() {
        while (*at_ != '\0') {
            symbol();
        }
    }

private:
    void symbol() {
        switch (*at_) {
            case '"': quoted('"'); break;
            case '[': quoted(']'); break;
            case '<': token(); break;
            case '#': comment(); break;
            case '{': repetition(); break;
            case '(':
                if (++nesting_ > bounds::kGrammarNestingMax) {
                    too_large("levels of parentheses", bounds::kGrammarNestingMax);
                }
                add(1);
                ++at_;
                break;
            case ')':
                nesting_ -= nesting_ > 0 ? 1 : 0;
                last_ = 1;
                ++at_;
                break;
            case ' ':
            case '\t':
            case '\r':
            case '\n': ++at_; break;
            default:
                add(1);
                ++at_;
                break;
        }
    }

    void add(size_t n) {
        last_ = n;
        grow(n);
    }

    void grow(size_t n) {
        elements_ += n;
        if (elements_ > bounds::kGrammarElementsMax) {
            too_large("elements with its repetitions written out", bounds::kGrammarElementsMax);
        }
    }

    void quoted(char end) {
        size_t n = 1;
        for (++at_; *at_ != '\0' && *at_ != end; ++n) {
            at_ += *at_ == '\\' && at_[1] != '\0' ? 2 : 1;
        }
        at_ += *at_ == end ? 1 : 0;
        add(n);
    }

    void token() {
        while (*at_ != '\0' && *at_ != '>') {
            ++at_;
        }
        at_ += *at_ == '>' ? 1 : 0;
        add(1);
    }

    void comment() {
        while (*at_ != '\0' && *at_ != '\r' && *at_ != '\n') {
            ++at_;
        }
    }

    void space() {
        while (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n' || *at_ == '#') {
            if (*at_ == '#') {
                comment();
            } else {
                ++at_;
            }
        }
    }

    size_t number() {
        size_t n = 0;
        while (*at_ >= '0' && *at_ <= '9') {
            n = std::min<size_t>(n * 10 + static_cast<size_t>(*at_ - '0'), bounds::kGrammarRepeatMax + 1);
            ++at_;
        }
        return n;
    }

    void repetition() {
        ++at_;
        space();
        const size_t low = number();
        space();
        size_t high = low;
        if (*at_ == ',') {
            ++at_;
            space();
            high = *at_ >= '0' && *at_ <= '9' ? number() : bounds::kGrammarRepeatMax + 1;
        }
        if (high <= bounds::kGrammarRepeatMax) {
            if (high < low) {  // written out by counting up from low to high
                refuse(std::string(kRefusal) + ": a repetition ends before it begins");
            }
            grow(last_ * high);
        } else {
            grow(last_ * std::min(low + 1, bounds::kGrammarRepeatMax));
        }
    }

    const char * at_;
    size_t       nesting_  = 0;
    size_t       elements_ = 0;
    size_t       last_     = 1;  // elements of the last symbol
};

bool is_end(const llama_grammar_element & element) {
    return element.type == LLAMA_GRETYPE_END || element.type == LLAMA_GRETYPE_ALT;
}

// Follows what can stand leftmost in a rule, as the sampler does when it looks for the next character. A cycle is
// harmless if each reference on it ends its alternative, as in the rules that a repetition is written out to;
// otherwise the elements after it are stacked up without end.
class LeftWalk {
public:
    explicit LeftWalk(const llama_grammar_rules & rules) :
        rules_(rules), empty_(rules.size()), order_(rules.size()), low_(rules.size()), circle_(rules.size(), kNone) {}

    void run() {
        find_empty();
        for (size_t rule = 0; rule < rules_.size(); ++rule) {
            if (order_[rule] == 0) {
                descend(rule);
            }
        }
    }

private:
    static constexpr size_t kNone = static_cast<size_t>(-1);

    struct Edge {
        size_t rule;
        bool   is_last;  // of its alternative
    };
    struct Frame {
        size_t            rule;
        std::vector<Edge> left;
        size_t            next = 0;
    };
    struct Circle {
        size_t depth;
        size_t ways;  // in which its rules may begin, at most
    };

    // Which rules may be empty: forwards and backwards over all rules until no more are found.
    void find_empty() {
        size_t n_sweeps = 0;
        for (bool more = true; more; ++n_sweeps) {
            more = false;
            for (size_t i = 0; i < rules_.size(); ++i) {
                const size_t rule = n_sweeps % 2 == 0 ? i : rules_.size() - 1 - i;
                if (!empty_[rule] && may_be_empty(rules_[rule])) {
                    empty_[rule] = more = true;
                }
            }
            if (n_sweeps > bounds::kLeftDepthMax) {
                too_large("leftmost references in a row", bounds::kLeftDepthMax);
            }
        }
    }

    bool may_be_empty(const llama_grammar_rule & rule) const {
        bool empty = true;
        for (const auto & element : rule) {
            if (!is_end(element)) {
                empty = empty && element.type == LLAMA_GRETYPE_RULE_REF && empty_[element.value];
            } else if (empty) {
                return true;
            } else {
                empty = true;
            }
        }
        return false;
    }

    std::vector<Edge> left_of(size_t rule) const {
        std::vector<Edge> out;
        bool              leftmost = true;
        for (size_t i = 0; i < rules_[rule].size(); ++i) {
            const auto & element = rules_[rule][i];
            if (is_end(element)) {
                leftmost = true;
            } else if (leftmost) {
                if (element.type == LLAMA_GRETYPE_RULE_REF) {
                    out.push_back({element.value, is_end(rules_[rule][i + 1])});
                }
                leftmost = element.type == LLAMA_GRETYPE_RULE_REF && empty_[element.value];
            }
        }
        return out;
    }

    // In how many ways a rule's alternatives begin with a character or token, or are empty.
    size_t own_ways(size_t rule) const {
        size_t n        = 0;
        bool   leftmost = true;
        for (const auto & element : rules_[rule]) {
            const bool is_ref = element.type == LLAMA_GRETYPE_RULE_REF;
            n += leftmost && !is_ref ? 1 : 0;
            leftmost = is_end(element) || (leftmost && is_ref && empty_[element.value]);
        }
        return n;
    }

    // Tarjan's algorithm: a rule's cycle is known once those of all rules that it leads to are.
    void descend(size_t start) {
        std::vector<Frame> frames;
        enter(frames, start);
        while (!frames.empty()) {
            Frame & frame = frames.back();
            if (frame.next < frame.left.size()) {
                const size_t rule = frame.left[frame.next++].rule;
                if (order_[rule] == 0) {
                    enter(frames, rule);
                } else if (circle_[rule] == kNone) {
                    low_[frame.rule] = std::min(low_[frame.rule], order_[rule]);
                }
                continue;
            }
            const size_t rule = frame.rule;
            frames.pop_back();
            if (low_[rule] == order_[rule]) {
                close(rule);
            }
            if (!frames.empty()) {
                low_[frames.back().rule] = std::min(low_[frames.back().rule], low_[rule]);
            }
        }
    }

    void enter(std::vector<Frame> & frames, size_t rule) {
        order_[rule] = low_[rule] = ++n_entered_;
        open_.push_back(rule);
        frames.push_back({rule, left_of(rule)});
    }

    // All open rules from `first` on are on one cycle.
    void close(size_t first) {
        const auto          begin = std::find(open_.begin(), open_.end(), first);
        std::vector<size_t> members(begin, open_.end());
        open_.erase(begin, open_.end());
        for (const size_t rule : members) {
            circle_[rule] = circles_.size();
        }
        Circle made{0, 0};
        for (const size_t rule : members) {
            made.ways += own_ways(rule);
            for (const Edge & edge : left_of(rule)) {
                if (circle_[edge.rule] != circles_.size()) {
                    const Circle & next = circles_[circle_[edge.rule]];
                    made.depth          = std::max(made.depth, next.depth);
                    made.ways           = std::min(made.ways + next.ways, bounds::kLeftWaysMax + 1);
                } else if (!edge.is_last) {
                    refuse(kRefusal);
                }
            }
        }
        made.depth += members.size();
        if (made.depth > bounds::kLeftDepthMax) {
            too_large("leftmost references in a row", bounds::kLeftDepthMax);
        }
        if (made.ways > bounds::kLeftWaysMax) {
            too_large("ways to begin a rule", bounds::kLeftWaysMax);
        }
        circles_.push_back(made);
    }

    const llama_grammar_rules & rules_;
    std::vector<bool>           empty_;
    std::vector<size_t>         order_;  // in which rules were met; 0: not yet
    std::vector<size_t>         low_;
    std::vector<size_t>         circle_;
    std::vector<Circle>         circles_;
    std::vector<size_t>         open_;
    size_t                      n_entered_ = 0;
};

// llama_grammar_parser::parse, which would print an invalid grammar on stderr.
void parse(llama_grammar_parser & parser, const std::string & text) {
    // Space and comments are skipped after a rule, so there is one before them.
    const std::string padded = "towerd-first-rule ::= \"a\"\n" + text;
    try {
        for (const char * at = padded.c_str(); *at != '\0';) {
            at = parser.parse_rule(at);
        }
    } catch (const std::exception &) {
        refuse(kRefusal);
    }
    const auto is_undefined = [&](const llama_grammar_element & element) {
        return element.type == LLAMA_GRETYPE_RULE_REF &&
               (element.value >= parser.rules.size() || parser.rules[element.value].empty());
    };
    for (const auto & rule : parser.rules) {
        if (rule.empty() || std::any_of(rule.begin(), rule.end(), is_undefined)) {
            refuse(kRefusal);
        }
    }
    if (parser.symbol_ids.find("root") == parser.symbol_ids.end()) {
        refuse(kRefusal);
    }
}

}  // namespace

void check_grammar(const std::string & text, const llama_vocab * vocab) {
    if (text.empty()) {
        return;
    }
    if (text.compare(0, 11, "%llguidance") == 0) {
        refuse(std::string(kRefusal) + ": llguidance is not enabled");
    }
    if (text.size() > bounds::kGrammarBytesMax) {
        too_large("bytes", bounds::kGrammarBytesMax);
    }
    TextScan(text.c_str()).run();
    llama_grammar_parser parser(vocab);
    parse(parser, text);
    LeftWalk(parser.rules).run();
}

}  // namespace towerd::wire
