// The Python bindings. Every call that is not a mere lookup releases the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bounds.h"
#include "devices.h"
#include "flags.h"
#include "head.h"
#include "history.h"
#include "interruption.h"
#include "media.h"
#include "prompts.h"
#include "received.h"
#include "refused.h"
#include "reply.h"
#include "request.h"
#include "speculation.h"
#include "writer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd::wire {

namespace {

using Ids   = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;
using Given = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows  = nb::ndarray<nb::numpy, int32_t, nb::shape<-1, 3>>;
using Table = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::string text_of(const nb::bytes & data) {
    return std::string(data.c_str(), data.size());
}

nb::bytes bytes_of(const std::string & text) {
    return nb::bytes(text.data(), text.size());
}

template <typename Work>
auto unlocked(Work && work) {
    const nb::gil_scoped_release free;
    return work();
}

template <typename Array>
Array owned(std::vector<int32_t> values, std::initializer_list<size_t> shape) {
    auto *            held = new std::vector<int32_t>(std::move(values));
    const nb::capsule owner(held, [](void * p) noexcept { delete static_cast<std::vector<int32_t> *>(p); });
    return Array(held->data(), shape, owner);
}

Ids ids_of(const llama_tokens & tokens) {
    const size_t n = tokens.size();
    return owned<Ids>(tokens, {n});
}

llama_tokens tokens_of(const Given & ids) {
    return llama_tokens(ids.data(), ids.data() + ids.shape(0));
}

nb::list arrays_of(const std::vector<llama_tokens> & prompts) {
    nb::list out;
    for (const auto & prompt : prompts) {
        out.append(ids_of(prompt));
    }
    return out;
}

std::vector<std::vector<std::vector<float>>> rows_of(const std::vector<Table> & tables) {
    std::vector<std::vector<std::vector<float>>> out;
    for (const Table & table : tables) {
        auto &        rows = out.emplace_back();
        const float * at   = table.data();
        for (size_t i = 0; i < table.shape(0); ++i, at += table.shape(1)) {
            rows.emplace_back(at, at + table.shape(1));
        }
    }
    return out;
}

Rows spans_of(const Request & request, size_t prompt) {
    std::vector<int32_t> rows;
    for (const auto & span : request.spans(prompt).spans) {
        rows.insert(rows.end(), {static_cast<int32_t>(span.role), static_cast<int32_t>(span.pos),
                                 static_cast<int32_t>(span.len)});
    }
    const size_t n = rows.size() / 3;
    return owned<Rows>(std::move(rows), {n, 3});
}

const char * name_of(stop_type stop) {
    switch (stop) {
        case STOP_TYPE_EOS:   return "eos";
        case STOP_TYPE_WORD:  return "word";
        case STOP_TYPE_LIMIT: return "limit";
        default:              return "";
    }
}

nb::object kept_field(const Request & request, const std::string & name) {
    const auto found = request.kept().find(name);
    return found == request.kept().end() ? nb::none() : nb::object(bytes_of(found->second));
}

template <typename T>
T * at(uintptr_t address) {
    return reinterpret_cast<T *>(address);  // NOLINT
}

// A Python function, which any thread may copy and destroy.
std::shared_ptr<nb::object> held(const nb::object & function) {
    return std::shared_ptr<nb::object>(new nb::object(function), [](nb::object * p) {
        const nb::gil_scoped_acquire lock;
        delete p;
    });
}

// Calls Python, whose errors become Refused: clients are not shown tracebacks.
template <typename Work>
auto asked(Work && work) {
    const nb::gil_scoped_acquire lock;
    std::string                  refusal;
    try {
        return work();
    } catch (nb::python_error & error) {
        refusal = text_of(nb::cast<nb::bytes>(nb::module_::import_("towerd.errors").attr("refusal")(error.value())));
    }
    throw Refused(json::parse(refusal));
}

Tokenizer tokenizer_of(const nb::object & function) {
    if (function.is_none()) {
        return {};
    }
    return [function = held(function)](const std::string & text) {
        return asked([&] { return tokens_of(nb::cast<Given>((*function)(nb::str(text.data(), text.size())))); });
    };
}

DeepStack deep_stack_of(const nb::object & function) {
    if (function.is_none()) {
        return {};
    }
    return [function = held(function)](const std::string & text, const std::function<void()> & work) {
        asked([&] { (*function)(bytes_of(text), nb::cpp_function([&work] { unlocked(work); })); });
    };
}

FitCheck fit_check_of(const nb::object & function) {
    if (function.is_none()) {
        return {};
    }
    return [function = held(function)](const std::map<std::string, std::string> & kept, const std::vector<size_t> & least) {
        asked([&] {
            nb::dict fields;
            for (const auto & [name, value] : kept) {
                fields[name.c_str()] = bytes_of(value);
            }
            (*function)(fields, nb::cast(least));
        });
    };
}

// An encoded medium, opaque to Python.
struct Encoded {
    std::vector<float> rows;
};

void bind_media(nb::module_ & m) {
    m.def(
        "check_medium",
        [](const nb::bytes & data) {
            const auto * begin = reinterpret_cast<const uint8_t *>(data.c_str());
            const raw_buffer file(begin, begin + data.size());
            unlocked([&] { answering(ERROR_TYPE_INVALID_REQUEST, [&] { check_medium(file); }); });
        },
        "data"_a);
    nb::class_<Medium>(m, "Medium")
        .def_prop_ro("ids", [](const Medium & medium) { return nb::cast(ids_of(medium.ids)); })
        .def_prop_ro("file", [](const Medium & medium) -> nb::object {
            if (medium.file == nullptr) {
                return nb::none();
            }
            return nb::bytes(medium.file->data(), medium.file->size());
        })
        .def_prop_ro("file_bytes", [](const Medium & medium) { return medium.file == nullptr ? 0 : medium.file->size(); })
        .def_prop_ro("file_id", [](const Medium & medium) { return reinterpret_cast<uintptr_t>(medium.file.get()); })
        .def_ro("ordinal", &Medium::ordinal);
    nb::class_<Encoded>(m, "Encoded");
    nb::class_<Projector>(m, "Projector")
        .def(
            "__init__",
            [](Projector * self, uintptr_t model, const nb::bytes & options) {
                const std::string text = text_of(options);
                unlocked([&] { new (self) Projector(at<llama_model>(model), text); });
            },
            "model"_a, "options"_a)
        .def_prop_ro("uses_mrope", &Projector::uses_mrope)
        .def("is_whole", &Projector::is_whole, "medium"_a)
        .def("encode",
             [](const Projector & p, const Medium & medium) { return unlocked([&] { return Encoded{p.encode(medium)}; }); },
             "medium"_a)
        .def("decode",
             [](const Projector & p, uintptr_t ctx, const Medium & medium, const Encoded & encoded, int pos, int seq,
                Head * head) {
                 unlocked([&] { p.decode(at<llama_context>(ctx), medium, encoded.rows, pos, seq, head); });
             },
             "ctx"_a, "medium"_a, "encoded"_a, "pos"_a, "seq"_a, "head"_a.none());
}

void bind_flags(nb::module_ & m) {
    m.def("is_file_name", [](const std::string & name) { return fs_validate_filename(name); }, "name"_a);
    m.def("server_flags", [] {
        nb::list found;
        for (const auto & flag : server_flags()) {
            found.append(nb::make_tuple(flag.names, flag.n_values));
        }
        return found;
    });
    m.def("number_of", &number_of, "name"_a);
    nb::class_<LoadFlags>(m, "LoadFlags")
        .def(nb::init<const std::vector<std::string> &>(), "words"_a)
        .def_prop_ro("numa", &LoadFlags::numa)
        .def("apply_to_model", [](const LoadFlags & f, uintptr_t params) { f.apply(*at<llama_model_params>(params)); },
             "params"_a)
        .def("apply_to_context",
             [](const LoadFlags & f, uintptr_t params) { f.apply(*at<llama_context_params>(params)); }, "params"_a);
}

void bind_model(nb::module_ & m) {
    m.def("device_bytes", [](uintptr_t model) { return device_bytes(*at<llama_model>(model)); }, "model"_a);
    m.def("token_bytes_max", [](uintptr_t model) { return token_bytes_max(at<llama_model>(model)); }, "model"_a);
    nb::class_<Model>(m, "Model")
        .def(
            "__init__",
            [](Model * self, uintptr_t model, const nb::bytes & settings, const nb::object & tokenizer,
               std::shared_ptr<Projector> projector, const nb::object & deep_stack) {
                const std::string text  = text_of(settings);
                Tokenizer         asked = tokenizer_of(tokenizer);
                const DeepStack   deep  = deep_stack_of(deep_stack);
                unlocked([&] {
                    new (self) Model(at<llama_model>(model), text, std::move(asked), std::move(projector), deep);
                });
            },
            "model"_a, "settings"_a, "tokenizer"_a = nb::none(), "projector"_a = nb::none(), "deep_stack"_a = nb::none())
        .def_prop_ro("token_bytes_max", &Model::token_bytes_max)
        .def("props", [](const Model & model) {
            return bytes_of(unlocked([&] { return safe_json_to_str(model.props()); }));
        })
        .def("apply_template",
             [](const Model & model, const nb::bytes & body) {
                 const std::string text = text_of(body);
                 return bytes_of(unlocked([&] { return template_reply(model, text); }));
             },
             "body"_a)
        .def("detokenize",
             [](const Model & model, const nb::bytes & body) {
                 const std::string text = text_of(body);
                 return bytes_of(unlocked([&] { return detokenize_reply(model, text); }));
             },
             "body"_a)
        .def("count_tokens",
             [](const Model & model, const std::string & endpoint, const nb::bytes & body) {
                 const std::string text = text_of(body);
                 return bytes_of(unlocked([&] { return count_reply(model, endpoint_named(endpoint).type, text); }));
             },
             "endpoint"_a, "body"_a)
        .def("medium_at",
             [](const Model & model, const nb::bytes & data, size_t ordinal) {
                 const auto *     begin = reinterpret_cast<const uint8_t *>(data.c_str());
                 const raw_buffer file(begin, begin + data.size());
                 return unlocked([&] {
                     std::optional<Medium> medium;
                     answering(ERROR_TYPE_INVALID_REQUEST, [&] { medium = medium_at(model, file, ordinal); });
                     return std::move(*medium);
                 });
             },
             "file"_a, "ordinal"_a);
}

struct Span {
    const uint8_t * begin = nullptr;
    const uint8_t * end   = nullptr;
};

// The part of a body. Throws std::invalid_argument.
Span span_of(const std::tuple<nb::bytes, size_t, size_t> & upload) {
    const auto & [body, start, end] = upload;
    if (start > end || end > body.size()) {
        throw std::invalid_argument("an upload lies within its body");
    }
    const auto * bytes = reinterpret_cast<const uint8_t *>(body.c_str());
    return {bytes + start, bytes + end};
}

void bind_request(nb::module_ & m) {
    nb::class_<Request>(m, "Request")
        .def(
            "__init__",
            [](Request * self, std::shared_ptr<const Model> model, const std::string & endpoint, const nb::bytes & body,
               const nb::object & check_fit, const std::optional<std::tuple<nb::bytes, size_t, size_t>> & upload,
               const std::optional<std::pair<Given, size_t>> & continued) {
                const std::string text  = text_of(body);
                const FitCheck    check = fit_check_of(check_fit);
                const Span        span  = upload ? span_of(*upload) : Span{};
                std::optional<Continued> known;
                if (continued) {
                    known = Continued{tokens_of(continued->first), continued->second};
                }
                unlocked([&] {
                    std::vector<raw_buffer> uploads;
                    if (upload) {
                        uploads.emplace_back(span.begin, span.end);
                    }
                    new (self) Request(std::move(model), endpoint_named(endpoint), text, check, std::move(uploads), known);
                });
            },
            "model"_a, "endpoint"_a, "body"_a, "check_fit"_a = nb::none(), "upload"_a = nb::none(),
            "continued"_a = nb::none())
        .def_prop_ro("id", [](const Request & r) { return r.params().oaicompat_cmpl_id; })
        .def_prop_ro("prompts", [](const Request & r) { return arrays_of(r.prompts()); })
        .def_prop_ro("n_choices", &Request::n_choices)
        .def_prop_ro("n_per_prompt", [](const Request & r) { return r.params().n_cmpl; })
        .def_prop_ro("stream", [](const Request & r) { return r.params().stream; })
        .def_prop_ro("n_predict", &Request::n_predict)
        .def("reply_bytes",
             [](const Request & r, size_t n_tokens) {
                 const ReplyBytes found = r.reply_bytes(n_tokens);
                 return std::make_tuple(found.kept, found.written, found.of_token);
             },
             "n_tokens"_a)
        .def_prop_ro("n_keep", [](const Request & r) { return r.params().n_keep; })
        .def_prop_ro("cache_prompt", [](const Request & r) { return r.params().cache_prompt; })
        .def_prop_ro("return_progress", [](const Request & r) { return r.params().return_progress; })
        .def_prop_ro("ping_s", [](const Request & r) { return r.params().sse_ping_interval; })
        .def_prop_ro("agent", [](const Request & r) { return bytes_of(r.agent()); })
        .def("media", [](const Request & r, size_t prompt) { return r.media(prompt); }, "prompt"_a)
        .def("spans", &spans_of, "prompt"_a)
        .def("field", &kept_field, "name"_a)
        .def("settings",
             [](const Request & r, bool brief) {
                 return bytes_of(unlocked([&] { return safe_json_to_str(r.params().to_json(brief)); }));
             },
             "brief"_a)
        .def_prop_ro("has_reasoning_control", &Request::has_reasoning_control)
        .def("upstream_body",
             [](const Request & r, size_t choice, const nb::bytes & own) {
                 const std::string text = text_of(own);
                 return bytes_of(unlocked([&] { return r.upstream_body(choice, text); }));
             },
             "choice"_a, "own"_a)
        .def("next_prompt",
             [](const Request & r, const nb::bytes & message) {
                 const std::string text = text_of(message);
                 return ids_of(unlocked([&] { return r.next_prompt(text); }));
             },
             "message"_a);
}

void bind_reply(nb::module_ & m) {
    nb::class_<Chunk>(m, "Chunk")
        .def_prop_ro("token", [](const Chunk & c) { return c.token.tok; })
        .def_prop_ro("text", [](const Chunk & c) { return bytes_of(c.is_sent ? c.token.text_to_send : ""); })
        .def_prop_ro("stop", [](const Chunk & c) { return name_of(c.stop); });

    nb::class_<Received>(m, "Received")
        .def_prop_ro("progress",
                     [](const Received & r) -> nb::object {
                         if (!r.progress) {
                             return nb::none();
                         }
                         const PromptProgress & p = *r.progress;
                         return nb::make_tuple(p.total, p.cached, p.processed, p.time_ms);
                     })
        .def_prop_ro("chunk", [](const Received & r) { return r.chunk ? nb::cast(*r.chunk) : nb::none(); })
        .def_prop_ro("ids", [](const Received & r) { return nb::tuple(nb::cast(r.ids)); })
        .def_ro("is_last", &Received::is_last);

    nb::class_<Reply>(m, "Reply")
        .def(nb::init<std::shared_ptr<const Request>, size_t>(), "request"_a, "choice"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("received",
             [](Reply & r, const nb::bytes & event) {
                 const std::string text = text_of(event);
                 return unlocked([&] { return r.received(text); });
             },
             "event"_a)
        .def_prop_ro("upstream_id", &Reply::upstream_id)
        .def_prop_ro("is_exact", &Reply::is_exact)
        .def_prop_ro("n_reused", &Reply::n_reused)
        .def_prop_ro("n_unnamed", &Reply::n_unnamed)
        .def("accept_prompt",
             [](Reply & r, const Given & ids) {
                 unlocked([&] { r.accept_prompt(ids.data(), ids.shape(0)); });
             },
             "ids"_a)
        .def("evaluated_before", &Reply::evaluated_before, "n"_a, "ms"_a)
        .def("started", &Reply::started, "n_cached"_a, "n_processed"_a, "prompt_ms"_a)
        .def("steps",
             [](Reply & r, uintptr_t ctx, int index, const Given & draft, int32_t n_room,
                const std::vector<double> & synthetic) {
                 const llama_tokens ids = tokens_of(draft);
                 return unlocked([&] { return r.steps(at<llama_context>(ctx), index, ids, n_room, synthetic); });
             },
             "ctx"_a, "index"_a, "draft"_a, "n_room"_a, "synthetic"_a = std::vector<double>())
        .def("limit", &Reply::limit, "truncated"_a)
        .def("truncate", &Reply::truncate)
        .def("end_reasoning", &Reply::end_reasoning, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("request", [](const Reply & r) { return std::const_pointer_cast<Request>(r.shared_request()); })
        .def_prop_ro("choice", &Reply::choice)
        .def_prop_ro("text", [](const Reply & r) { return bytes_of(r.text()); })
        .def_prop_ro("stop", [](const Reply & r) { return name_of(r.stop()); })
        .def_prop_ro("stopping_word", [](const Reply & r) { return bytes_of(r.stopping_word()); })
        .def_prop_ro("has_new_line", &Reply::has_new_line)
        .def_prop_ro("n_kept", &Reply::n_kept)
        .def_prop_ro("timings", [](const Reply & r) {
            const server_slot_stats stats = r.stats();
            return std::make_tuple(stats.n_prompt_cached, stats.n_prompt_processed, stats.t_prompt_ms(), stats.n_gen,
                                   stats.t_gen_ms());
        })
        .def_prop_ro("drafted", [](const Reply & r) {
            const server_slot_stats stats = r.stats();
            return std::make_tuple(stats.n_draft_tokens, stats.n_draft_accepted);
        });
}

void bind_speculation(nb::module_ & m) {
    nb::class_<Speculation>(m, "Speculation")
        .def(
            "__init__",
            [](Speculation * self, const Model & model, uintptr_t ctx, int n_slots, int n_threads, int n_threads_batch) {
                unlocked([&] {
                    new (self) Speculation(model, at<llama_context>(ctx), n_slots, n_threads, n_threads_batch);
                });
            },
            "model"_a, "ctx"_a, "n_slots"_a, "n_threads"_a, "n_threads_batch"_a, nb::keep_alive<1, 2>())
        .def_static("is_asked_for", &Speculation::is_asked_for, "model"_a)
        .def("draft",
             [](Speculation & s, const std::vector<std::tuple<int, Given, int>> & asked) {
                 std::vector<Speculation::Asked> texts;
                 for (const auto & [slot, ids, n_max] : asked) {
                     texts.push_back({slot, tokens_of(ids), n_max});
                 }
                 return arrays_of(unlocked([&] { return s.draft(std::move(texts)); }));
             },
             "asked"_a)
        .def("accept", &Speculation::accept, "slot"_a, "n_accepted"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("synthetic", [](const Speculation & s) { return nb::tuple(nb::cast(s.synthetic())); });
}

void bind_head(nb::module_ & m) {
    nb::class_<Head>(m, "Head")
        .def(
            "__init__",
            [](Head * self, const Model & model, uintptr_t ctx, uintptr_t flags, int n_running, const std::string & path) {
                unlocked([&] {
                    new (self) Head(model, at<llama_context>(ctx), *at<llama_context_params>(flags), n_running, path);
                });
            },
            "model"_a, "ctx"_a, "flags"_a, "n_running"_a, "path"_a, nb::keep_alive<1, 2>())
        .def_static("is_asked_for", &Head::is_asked_for, "model"_a)
        .def_prop_ro("followed_context",
                     [](const Head & head) { return reinterpret_cast<uintptr_t>(head.followed_context()); })
        .def_prop_ro("lag", &Head::lag)
        .def("changed", &Head::changed, "seq"_a, "p"_a)
        .def("follow",
             [](Head & head, const Given & ids, const Given & pos, const Given & seqs) {
                 const auto tokens = tokens_of(ids), positions = tokens_of(pos), sequences = tokens_of(seqs);
                 unlocked([&] { head.follow(tokens, positions, sequences); });
             },
             "ids"_a, "pos"_a, "seqs"_a)
        .def("draft",
             [](Head & head, const std::vector<std::tuple<int, int, int, int>> & asked) {
                 std::vector<Head::Asked> all;
                 for (const auto & [seq, last, pos, n_max] : asked) {
                     all.push_back({seq, last, pos, n_max});
                 }
                 return arrays_of(unlocked([&] { return head.draft(all); }));
             },
             "asked"_a)
        .def("accept", &Head::accept, "seq"_a, "n_accepted"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("synthetic", [](const Head & head) { return nb::tuple(nb::cast(head.synthetic())); });
}

void bind_writer(nb::module_ & m) {
    nb::class_<Writer>(m, "Writer")
        .def("__init__",
             [](Writer * self, std::shared_ptr<const Request> request, const nb::bytes & shown) {
                 new (self) Writer(std::move(request), text_of(shown));
             },
             "request"_a, "shown"_a = nb::bytes(""))
        .def("partial",
             [](Writer & w, const Chunk & chunk) { return bytes_of(unlocked([&] { return w.partial(chunk); })); },
             "chunk"_a)
        .def("progress",
             [](Writer & w, size_t choice, int32_t total, int32_t cached, int32_t processed, int64_t time_ms) {
                 return bytes_of(unlocked([&] { return w.progress(choice, total, cached, processed, time_ms); }));
             },
             "choice"_a, "total"_a, "cached"_a, "processed"_a, "time_ms"_a)
        .def("final",
             [](Writer & w, Reply & reply, int id_slot, int32_t n_cached, const nb::bytes & extra,
                const nb::bytes & shown) {
                 const std::string text = text_of(extra), fields = text_of(shown);
                 return bytes_of(unlocked([&] { return w.final(reply, id_slot, n_cached, text, fields); }));
             },
             "reply"_a, "id_slot"_a, "n_cached"_a, "extra"_a, "shown"_a = nb::bytes(""))
        .def("response_id", &Writer::response_id, "choice"_a)
        .def("response", [](const Writer & w, size_t choice) {
            return bytes_of(unlocked([&] { return w.response(choice); }));
        }, "choice"_a)
        .def("end", [](const Writer & w) { return bytes_of(w.end()); })
        .def("message", [](const Writer & w, size_t choice) {
            return bytes_of(unlocked([&] { return w.message(choice); }));
        }, "choice"_a);
}

void bind_interruption(nb::module_ & m) {
    nb::class_<Interruption>(m, "Interruption")
        .def(
            "__init__",
            [](Interruption * self, uintptr_t ctx) { new (self) Interruption(at<llama_context>(ctx)); }, "ctx"_a)
        .def("arm", &Interruption::arm)
        .def("disarm", &Interruption::disarm)
        .def("ask", &Interruption::ask);
}

void bind_others(nb::module_ & m) {
    m.def("mended_json", [](const nb::bytes & body) {
        std::string text = text_of(body);
        return bytes_of(unlocked([&] { return mended_json(std::move(text)); }));
    }, "body"_a);
    nb::class_<EmbeddingRequest>(m, "EmbeddingRequest")
        .def(
            "__init__",
            [](EmbeddingRequest * self, const Model & model, bool openai, const nb::bytes & body) {
                const std::string text = text_of(body);
                unlocked([&] { new (self) EmbeddingRequest(model, openai, text); });
            },
            "model"_a, "openai"_a, "body"_a)
        .def_prop_ro("prompts", [](const EmbeddingRequest & r) { return arrays_of(r.prompts()); })
        .def_prop_ro("normalize", &EmbeddingRequest::normalize)
        .def("reply",
             [](const EmbeddingRequest & r, const std::vector<Table> & rows) {
                 return bytes_of(unlocked([&] { return r.reply(rows_of(rows)); }));
             },
             "rows"_a);
    nb::class_<RerankRequest>(m, "RerankRequest")
        .def(
            "__init__",
            [](RerankRequest * self, const Model & model, const nb::bytes & body) {
                const std::string text = text_of(body);
                unlocked([&] { new (self) RerankRequest(model, text); });
            },
            "model"_a, "body"_a)
        .def_prop_ro("prompts", [](const RerankRequest & r) { return arrays_of(r.prompts()); })
        .def("reply",
             [](const RerankRequest & r, const std::vector<float> & scores) {
                 return bytes_of(unlocked([&] { return r.reply(scores); }));
             },
             "scores"_a);
}

}  // namespace

}  // namespace towerd::wire

NB_MODULE(_wire, m) {
    m.doc() = "llama.cpp's own request and response code; the contracts are in towerd.wire.";
    nb::set_leak_warnings(false);  // what a daemon still holds at its end
    const nb::object refused = nb::module_::import_("towerd.errors").attr("WireError");
    nb::register_exception_translator(
        [](const std::exception_ptr & thrown, void * type) {
            try {
                std::rethrow_exception(thrown);
            } catch (const towerd::wire::Refused & error) {
                const std::string text = safe_json_to_str(error.error());
                const nb::object  args = nb::make_tuple(nb::bytes(text.data(), text.size()));
                PyErr_SetObject(static_cast<PyObject *>(type), args.ptr());
            }
        },
        refused.inc_ref().ptr());
    towerd::wire::bind_media(m);
    towerd::wire::bind_flags(m);
    towerd::wire::bind_model(m);
    towerd::wire::bind_request(m);
    towerd::wire::bind_reply(m);
    towerd::wire::bind_speculation(m);
    towerd::wire::bind_head(m);
    towerd::wire::bind_interruption(m);
    towerd::wire::bind_writer(m);
    towerd::wire::bind_others(m);
}
