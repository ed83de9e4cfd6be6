// The bytes of a response: the events of a stream, or a single reply.

#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "reply.h"

namespace towerd::wire {

class Writer {
public:
    // `shown`: empty, or a JSON object whose fields are in every object of a response of /v1/responses. These then also
    // say whether the response came to its end.
    explicit Writer(std::shared_ptr<const Request> request, const std::string & shown = "");

    // The events of one token; empty if its character is incomplete, or if the reply is not streamed.
    // This and the following raise Refused if the generated text is not a reply in the model's format.
    std::string partial(const Chunk & chunk);
    // The events of `prompt_progress`.
    std::string progress(size_t choice, int32_t total, int32_t cached, int32_t processed, int64_t time_ms);
    // The events that close one choice of a stream; without streaming the whole reply, once every choice has ended.
    // `extra`: a JSON object whose fields are added to the reply, or to the last event of a stream. `shown`: empty, or a
    // JSON object whose fields replace those that are shown in this choice's response. A stream gets the text that `partial`
    // has not written.
    std::string final(Reply & reply, int id_slot, int32_t n_cached, const std::string & extra,
                      const std::string & shown = "");
    // The id of a choice's response, of /v1/responses.
    std::string response_id(size_t choice) const;
    // The object of a choice's response, which has ended, of /v1/responses.
    std::string response(size_t choice) const;
    // The bytes after the last choice of a stream.
    std::string end() const;
    // The message that a choice has become so far, as its client may send it back.
    std::string message(size_t choice) const;

private:
    template <typename Result>
    void        describe(Result & result, size_t choice) const;
    std::string events(const json & data) const;
    void        keep(size_t choice, json data);
    std::string whole();
    int32_t     n_shown(size_t choice, int32_t n_decoded);
    std::string rest(const Reply & reply, const server_task_result_cmpl_final & ended);
    std::string unsent(const Reply & reply) const;
    static void show(json & data, const json & shown, stop_type stop = STOP_TYPE_NONE);
    void        check_depth(size_t choice, const std::string & text);

    std::shared_ptr<const Request> request_;
    mutable std::mutex             mutex_;
    std::vector<task_result_state> states_;
    std::vector<size_t>            depths_;  // of brackets open in each choice's text
    std::vector<bool>              has_begun_;
    std::vector<std::string>       finals_;  // texts, which take far less than values do; empty: not there yet
    json                           common_;  // of several choices in one object: the first one's, without `choices`
    json                           shown_;
    std::vector<std::string>       responses_;  // of each choice
};

}  // namespace towerd::wire
