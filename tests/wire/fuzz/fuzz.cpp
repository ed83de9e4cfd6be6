// Throws broken requests at towerd.wire and generates a few tokens for those that it takes. Built with sanitizers (see
// Makefile): `fuzz MODEL TEMPLATES MEDIA SECONDS [SEED]`, with 0 seconds one case again. Whatever is refused is fine; a crash, a
// wrong read, another exception or a case that takes a minute is not.

#include <sanitizer/common_interface_defs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "base64.hpp"
#include "bodies.h"
#include "llama.h"
#include "prompts.h"
#include "random.h"
#include "refused.h"
#include "reply.h"
#include "speculation.h"
#include "writer.h"

namespace {

using nlohmann::json;
using namespace towerd::wire;

constexpr int         kContext     = 256;
constexpr unsigned    kCaseSeconds = 60;
constexpr std::size_t kTokensMax   = 8;
const char *          kTemplates[] = {
    "",
    "chatml",
    "Qwen-Qwen3-0.6B.jinja",
    "Qwen3-Coder.jinja",
    "openai-gpt-oss-120b.jinja",
    "meta-llama-Llama-3.1-8B-Instruct.jinja",
    "mistralai-Mistral-Nemo-Instruct-2407.jinja",
    "google-gemma-4-31B-it.jinja",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja",
    "LFM2-8B-A1B.jinja",
};

std::uint64_t seed_in_work = 0;
std::string   body_in_work;

void report() {
    std::fprintf(stderr, "seed %llu\n%.4000s\n", static_cast<unsigned long long>(seed_in_work), body_in_work.c_str());
}

void on_signal(int number) {
    std::fprintf(stderr, "signal %d\n", number);
    report();
    std::_Exit(1);
}

template <typename T>
const T & any_of(Random & random, const std::vector<T> & from) {
    return from[random.between(0, from.size() - 1)];
}

// Every value of a document.
void collect(json & value, std::vector<json *> & out) {
    out.push_back(&value);
    if (value.is_structured()) {
        for (auto & item : value) {
            collect(item, out);
        }
    }
}

void change_value(Random & random, json & body) {
    std::vector<json *> all;
    collect(body, all);
    json &     at    = *any_of(random, all);
    const json value = random.chance(3) ? *any_of(random, all) : json::parse(any_of(random, kValues));
    switch (random.between(0, 5)) {
        case 0: at = value; break;
        case 1: at = json::array({at, value}); break;
        case 2: at = json{{any_of(random, kKeys), at}}; break;
        case 3:
            if (at.is_object()) {
                at[any_of(random, kKeys)] = value;
            } else if (at.is_array()) {
                at.push_back(value);
            }
            break;
        case 4:
            if (at.is_structured() && !at.empty()) {
                auto place = at.begin();
                std::advance(place, random.between(0, at.size() - 1));
                at.erase(place);
            }
            break;
        default:
            if (at.is_string()) {
                std::string text = at.get<std::string>();
                text.insert(random.between(0, text.size()), std::string(random.between(1, 300), "a({[\"\\<|\n "[random.between(0, 9)]));
                at = text;
            } else if (body.is_object()) {
                body[any_of(random, kKeys)] = value;
            }
    }
}

void change_bytes(Random & random, std::string & text) {
    for (std::size_t n = random.between(1, 4); n > 0 && !text.empty(); --n) {
        const std::size_t at = random.between(0, text.size() - 1);
        switch (random.between(0, 3)) {
            case 0: text[at] = static_cast<char>(random.bits()); break;
            case 1: text.erase(at, random.between(1, 8)); break;
            case 2: text.insert(at, text.substr(random.between(0, text.size() - 1), random.between(1, 40))); break;
            default: text.insert(at, random.between(1, 400), "[{(\",:\\9"[random.between(0, 7)]); break;
        }
    }
}

std::string broken(Random & random, const char * text) {
    json body = json::parse(text);
    for (std::size_t n = random.between(0, 6); n > 0; --n) {
        change_value(random, body);
    }
    std::string out = body.dump(-1, ' ', random.chance(2), json::error_handler_t::replace);
    if (random.chance(4)) {
        change_bytes(random, out);
    }
    return out;
}

std::string read(const std::filesystem::path & path) {
    std::ifstream     file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// A projector, and what it takes.
struct Sense {
    std::shared_ptr<Model>   model;
    std::string              part;  // of a message: what stands before the bytes
    std::vector<std::string> media;
};

class Fuzzer {
public:
    Fuzzer(const char * path, const std::string & templates, const std::string & media) : path_(path) {
        llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
        llama_backend_init();
        model_             = llama_model_load_from_file(path, llama_model_default_params());
        auto params        = llama_context_default_params();
        params.n_ctx       = kContext;
        params.n_threads   = params.n_threads_batch = 1;
        context_           = llama_init_from_model(model_, params);
        for (const char * name : kTemplates) {
            const bool is_file = std::string(name).find('.') != std::string::npos;
            models_.push_back(made(is_file ? read(templates + "/" + name) : name));
        }
        add_sense(media, "seeing", "picture", R"({"type": "image_url", "image_url": {"url": ")");
        add_sense(media, "hearing", "sound", R"({"type": "input_audio", "input_audio": {"data": ")");
        add_speculation({"--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "2"});
        add_speculation({"--spec-type", "ngram-simple"});
        add_speculation({"-md", path_, "--spec-draft-n-max", "4", "-td", "1"});
    }

    ~Fuzzer() {
        speculations_.clear();
        llama_free(context_);
        llama_model_free(model_);
    }

    void run(std::uint64_t seed) {
        seed_in_work = seed;
        Random       random(seed);
        const Body & body     = any_of(random, kBodies);
        const auto   kind     = random.between(0, 7);
        std::string  endpoint = kind == 0 ? "media" : kind == 1 ? "drafts" : body.endpoint;
        alarm(kCaseSeconds);
        try {
            ++counts_[endpoint].first;
            if (kind == 0) {
                show(random, any_of(random, senses_));
            } else if (kind == 1) {
                body_in_work = "drafts";
                draft(random, *any_of(random, speculations_));
            } else {
                body_in_work = broken(random, body.text);
                ask(random, any_of(random, models_), endpoint);
            }
            ++counts_[endpoint].second;
        } catch (const Refused & error) {
            safe_json_to_str(error.error());
        }
        alarm(0);
    }

    void print() const {
        for (const auto & [endpoint, counts] : counts_) {
            std::printf("%s %llu, answered %llu\n", endpoint.c_str(), counts.first, counts.second);
        }
    }

private:
    std::shared_ptr<Model> made(const std::string & chat_template, const std::vector<std::string> & flags = {},
                                std::shared_ptr<const Projector> projector = {}) const {
        const json settings = {
            {"name", "fuzz"}, {"kept_fields", {"retention", "model"}}, {"n_ctx", kContext}, {"n_batch", 512},
            {"n_parallel", 2}, {"text_bytes_max", 0}, {"is_upstream", false}, {"defaults", json::object()},
            {"chat_template", chat_template},
            {"flags", flags},
        };
        return std::make_shared<Model>(model_, settings.dump(), Tokenizer(), std::move(projector));
    }

    void add_sense(const std::string & folder, const std::string & projector, const std::string & kind,
                   const std::string & part) {
        const json options = {
            {"path", folder + "/" + projector + ".gguf"}, {"digest", "d"}, {"n_threads", 1}, {"use_gpu", false},
            {"image_min_tokens", -1}, {"image_max_tokens", -1}, {"warmup", false},
        };
        Sense sense{made("chatml", {}, std::make_shared<Projector>(model_, options.dump())), part, {}};
        for (const auto & entry : std::filesystem::directory_iterator(folder)) {
            if (entry.path().filename().string().rfind(kind, 0) == 0) {
                sense.media.push_back(read(entry.path()));
            }
        }
        std::sort(sense.media.begin(), sense.media.end());
        senses_.push_back(std::move(sense));
    }

    void add_speculation(const std::vector<std::string> & flags) {
        speculations_.push_back(std::make_unique<Speculation>(*made("", flags), context_, kSlots, 1, 1));
    }

    // A chat, or a prompt that is none, with media whose bytes are broken.
    void show(Random & random, const Sense & sense) {
        std::string content, data;
        for (std::size_t n = random.between(1, 2); n > 0; --n) {
            std::string bytes = any_of(random, sense.media);
            for (std::size_t changes = random.between(0, 3); changes > 0; --changes) {
                change_bytes(random, bytes);
            }
            const std::string text = base64::encode(bytes.data(), bytes.size());
            const bool        raw  = sense.part.find("audio") != std::string::npos || random.chance(4);
            content += sense.part + (raw ? "" : "data:image/png;base64,") + text + "\"}},";
            data += (data.empty() ? "\"" : ",\"") + text + "\"";
        }
        const bool        is_chat = random.chance(2);
        const std::string marker  = get_media_marker();
        body_in_work = is_chat
            ? R"({"max_tokens": 2, "messages": [{"role": "user", "content": [)" + content + R"({"type": "text", "text": "x"}]}]})"
            : R"({"n_predict": 2, "prompt": {"prompt_string": "a )" + marker + R"( b", "multimodal_data": [)" + data + "]}}";
        const char * endpoint = is_chat ? "chat" : "completion";
        if (is_chat && random.chance(3)) {
            count_reply(*sense.model, endpoint_named(endpoint).type, body_in_work);
        }
        const auto request = std::make_shared<Request>(sense.model, endpoint_named(endpoint), body_in_work);
        for (const Medium & medium : request->media(0)) {
            if (medium.ids.size() < kContext / 2) {
                const std::vector<float> encoded = sense.model->projector()->encode(medium);
                llama_memory_clear(llama_get_memory(context_), true);
                sense.model->projector()->decode(context_, medium, encoded, 0, 0);
            }
        }
        answer(request);
    }

    // Texts that grow, are cut, or are others, with ids of media among them.
    void draft(Random & random, Speculation & speculation) {
        std::vector<llama_tokens> texts(kSlots);
        for (std::size_t turn = random.between(1, 8); turn > 0; --turn) {
            std::vector<Speculation::Asked> asked;
            for (int slot = 0; slot < kSlots; ++slot) {
                auto & text = texts[slot];
                if (random.chance(6)) {
                    text.resize(random.between(0, text.size()));
                }
                const std::size_t n_kinds = random.chance(4) ? 600 : 3;
                for (std::size_t n = random.between(1, random.chance(8) ? 900 : 20); n > 0; --n) {
                    text.push_back(random.chance(200) ? -7 : static_cast<llama_token>(random.between(3, 3 + n_kinds)) % 512);
                }
                if (!random.chance(4)) {
                    asked.push_back({slot, text, static_cast<int>(random.between(1, 12))});
                }
            }
            const auto drafts = speculation.draft(asked);
            for (std::size_t i = 0; i < asked.size(); ++i) {
                if (drafts.at(i).size() > static_cast<std::size_t>(asked[i].n_max)) {
                    std::abort();
                }
                const std::size_t n_right = random.between(0, drafts[i].size());
                speculation.accept(asked[i].slot, static_cast<int>(n_right));
                auto & text = texts[asked[i].slot];
                text.insert(text.end(), drafts[i].begin(), drafts[i].begin() + static_cast<std::ptrdiff_t>(n_right));
            }
        }
    }

    void ask(Random & random, const std::shared_ptr<Model> & model, const std::string & endpoint) {
        if (endpoint == "embeddings") {
            const EmbeddingRequest request(*model, random.chance(2), body_in_work);
            request.reply(std::vector<std::vector<std::vector<float>>>(request.prompts().size(), {{0.5f, 1.0f}}));
        } else if (endpoint == "rerank") {
            const RerankRequest request(*model, body_in_work);
            request.reply(std::vector<float>(request.prompts().size(), 0.5f));
        } else if (random.chance(8)) {
            template_reply(*model, body_in_work);
            count_reply(*model, endpoint_named(endpoint).type, body_in_work);
        } else {
            answer(std::make_shared<Request>(model, endpoint_named(endpoint), body_in_work));
        }
    }

    void answer(const std::shared_ptr<Request> & request) {
        Writer writer(request);
        for (std::size_t choice = 0; choice < std::min<std::size_t>(request->n_choices(), 2); ++choice) {
            Reply        reply(request, choice);
            const auto & prompt = request->prompt_of(choice);
            reply.accept_prompt(prompt.data(), prompt.size());
            reply.started(0, prompt.size(), 1.0);
            writer.progress(choice, static_cast<int32_t>(prompt.size()), 0, 1, 2);
            generate(reply, writer);
            writer.final(reply, 0, 1, "{\"towerd\": {}}");
            const std::string message = writer.message(choice);
            request->next_prompt(message);
        }
        writer.end();
        request->params().to_json(false).dump_safe();
    }

    void generate(Reply & reply, Writer & writer) {
        llama_memory_clear(llama_get_memory(context_), true);
        llama_token token = 1;
        for (std::size_t i = 0; i < kTokensMax; ++i) {
            if (llama_decode(context_, llama_batch_get_one(&token, 1)) != 0) {
                std::abort();
            }
            const Chunk chunk = reply.steps(context_, -1, {}, 1).front();
            writer.partial(chunk);
            if (chunk.stop != STOP_TYPE_NONE) {
                return;
            }
            reply.end_reasoning();
            token = chunk.token.tok;
        }
        reply.limit(false);
    }

    using Counts = std::pair<unsigned long long, unsigned long long>;

    static constexpr int kSlots = 2;

    std::string                         path_;
    llama_model *                       model_;
    llama_context *                     context_;
    std::vector<std::shared_ptr<Model>> models_;
    std::vector<Sense>                  senses_;
    std::vector<std::unique_ptr<Speculation>> speculations_;
    std::map<std::string, Counts>       counts_;
};

// A failed assertion of llama.cpp is an exception here.
void check_guard() {
    try {
        answering(ERROR_TYPE_SERVER, [] { GGML_ABORT("as an exception"); });
    } catch (const Refused & error) {
        if (std::string(error.what()).find("as an exception") != std::string::npos) {
            return;
        }
    }
    std::fprintf(stderr, "an assertion was not caught\n");
    std::exit(1);
}

}  // namespace

int main(int n_arguments, char ** arguments) {
    if (n_arguments < 5) {
        std::fprintf(stderr, "fuzz MODEL TEMPLATES MEDIA SECONDS [SEED]\n");
        return 2;
    }
    const double        seconds = std::atof(arguments[4]);
    const std::uint64_t first   = n_arguments > 5 ? std::strtoull(arguments[5], nullptr, 10) : 1;
    __sanitizer_set_death_callback(report);
    for (const int number : {SIGALRM, SIGABRT}) {
        std::signal(number, on_signal);
    }
    check_guard();
    Fuzzer fuzzer(arguments[1], arguments[2], arguments[3]);
    using Clock    = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    for (std::uint64_t seed = first; seed == first || Clock::now() < end; ++seed) {
        fuzzer.run(seed);
    }
    fuzzer.print();
}
