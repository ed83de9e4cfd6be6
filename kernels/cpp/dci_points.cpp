#include "dci_points.h"

#include <algorithm>
#include <cmath>

namespace towerd {

namespace {

constexpr std::size_t kLanes     = 8;
constexpr std::size_t kAtOnce    = 64;  // rows that are scored at a time
constexpr std::size_t kDecoded   = 16;  // of them decoded first
constexpr std::size_t kDimsStack = 2048;
constexpr double      kScaleMin  = 1e-15;
constexpr double      kHeadroom  = 1.25;  // of the scale, when a key longer than all before is added

double square(const float * values, std::size_t n) {
    double sum = 0;
    for (std::size_t i = 0; i < n; ++i) {
        sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    }
    return sum;
}

const std::uint8_t * bytes_of(const float * row) { return reinterpret_cast<const std::uint8_t *>(row); }

// Eight running sums in a fixed order: every machine gets the same bits, with any vector width.
float dot(const Isa & isa, const float * a, const float * b, std::size_t n) {
    const std::uint8_t * row = bytes_of(b);
    float                sum = 0;
    isa.dots[kF32](a, &row, 1, n, &sum);
    return sum;
}

// A row of floats, on the stack unless it is long.
class Row {
  public:
    explicit Row(std::size_t n) : long_(n > kDimsStack ? n : 0), data_(n > kDimsStack ? long_.data() : short_) {}
    Row(const Row &) = delete;
    Row & operator=(const Row &) = delete;

    float * data() { return data_; }

  private:
    float              short_[kDimsStack];
    std::vector<float> long_;
    float *            data_;
};

}  // namespace

DciPoints::DciPoints(std::size_t n_dims, const std::vector<float> & directions, const Isa & isa)
    : n_dims_(n_dims), isa_(&isa), padded_((n_dims + kLanes - 1) / kLanes * kLanes),
      n_directions_(directions.size() / (n_dims + 1)), directions_(n_directions_ * padded_),
      direction_last_(n_directions_) {
    for (std::size_t i = 0; i < n_directions_; ++i) {
        const float * row = directions.data() + i * (n_dims + 1);
        std::copy_n(row, n_dims, directions_.data() + i * padded_);
        direction_last_[i] = row[n_dims];
    }
}

std::size_t DciPoints::nbytes() const {
    return (last_.capacity() + upper_keys_.capacity() + directions_.size()) * sizeof(float) +
           upper_.capacity() * sizeof(DciId);
}

void DciPoints::read(const DciKeys & keys, DciId id, float * to) const {
    const auto at = static_cast<std::size_t>(id);
    if (upper_[at] >= 0) {
        std::copy_n(upper_keys_.data() + static_cast<std::size_t>(upper_[at]) * padded_, padded_, to);
    } else {
        keys.read(at, *isa_, to);
        std::fill(to + n_dims_, to + padded_, 0.0f);
    }
}

void DciPoints::set_last(const float * values, std::size_t id) {
    last_[id] = static_cast<float>(std::sqrt(std::max(0.0, 1.0 - square(values, n_dims_) / (scale_ * scale_))));
}

bool DciPoints::make_room(const DciKeys & keys) {
    Row    row(padded_);
    double longest = 0;
    for (std::size_t id = size(); id < keys.size(); ++id) {
        keys.read(id, *isa_, row.data());
        longest = std::max(longest, square(row.data(), n_dims_));
    }
    longest = std::sqrt(longest);
    if (scale_ >= longest && scale_ > 0) {
        return false;
    }
    scale_ = std::max(kScaleMin, size() == 0 ? longest : longest * kHeadroom);
    for (std::size_t id = 0; id < size(); ++id) {
        if (is_present(keys, id)) {
            read(keys, static_cast<DciId>(id), row.data());
            set_last(row.data(), id);
        }
    }
    return true;
}

void DciPoints::add(const DciKeys & keys) {
    Row               row(padded_);
    const std::size_t before = size();
    reserve_for(last_, keys.size());
    reserve_for(upper_, keys.size());
    last_.resize(keys.size());
    upper_.resize(keys.size(), -1);
    for (std::size_t id = before; id < keys.size(); ++id) {
        keys.read(id, *isa_, row.data());
        set_last(row.data(), id);
    }
}

void DciPoints::promote(const DciKeys & keys, DciId id) {
    const std::size_t n = upper_keys_.size() / padded_;
    reserve_for(upper_keys_, upper_keys_.size() + padded_);
    upper_keys_.resize(upper_keys_.size() + padded_);
    read(keys, id, upper_keys_.data() + n * padded_);
    upper_[static_cast<std::size_t>(id)] = static_cast<DciId>(n);
}

// The products of the query with these keys: rows of one codec in a row are read together.
void DciPoints::dots(const DciKeys & keys, const DciQuery & query, const DciId * ids, std::size_t n, float * to) const {
    const std::uint8_t * rows[kAtOnce];
    CodecId              codecs[kAtOnce];
    for (std::size_t i = 0; i < n; ++i) {
        const auto id = static_cast<std::size_t>(ids[i]);
        const bool is_upper = upper_[id] >= 0;
        rows[i]   = is_upper ? bytes_of(upper_keys_.data() + static_cast<std::size_t>(upper_[id]) * padded_) : keys.at(id);
        codecs[i] = is_upper ? kF32 : keys.codec(id);
        if (!is_upper && (codecs[i] > kBf16 || padded_ != n_dims_)) {
            codecs[i] = kCodecs;  // to be decoded
        }
    }
    for (std::size_t first = 0; first < n;) {
        std::size_t end = first + 1;
        while (end < n && codecs[end] == codecs[first]) {
            ++end;
        }
        if (codecs[first] != kCodecs) {
            isa_->dots[codecs[first]](query.vector.data(), rows + first, end - first, padded_, to + first);
            first = end;
            continue;
        }
        Row                  decoded(kDecoded * padded_);
        const std::uint8_t * each[kDecoded];
        end = std::min(end, first + kDecoded);
        for (std::size_t i = first; i < end; ++i) {
            float * row = decoded.data() + (i - first) * padded_;
            read(keys, ids[i], row);
            each[i - first] = bytes_of(row);
        }
        isa_->dots[kF32](query.vector.data(), each, end - first, padded_, to + first);
        first = end;
    }
}

void DciPoints::score(const DciKeys & keys, const DciQuery & query, const DciId * ids, std::size_t n,
                      std::vector<DciScored> & to) const {
    float products[kAtOnce];
    for (std::size_t done = 0; done < n; done += kAtOnce) {
        const std::size_t some = std::min(kAtOnce, n - done);
        dots(keys, query, ids + done, some, products);
        for (std::size_t i = 0; i < some; ++i) {
            const DciId id   = ids[done + i];
            const float last = query.last == 0 ? 0 : query.last * last_[static_cast<std::size_t>(id)];
            to.push_back({products[i] + last, id});
        }
    }
}

void DciPoints::project(const DciKeys & keys, DciId id, float * to) const {
    Row row(padded_);
    read(keys, id, row.data());
    const auto last = static_cast<double>(last_[static_cast<std::size_t>(id)]);
    for (std::size_t j = 0; j < n_directions_; ++j) {
        const float raw = dot(*isa_, directions_.data() + j * padded_, row.data(), padded_);
        to[j] = static_cast<float>(static_cast<double>(raw) / scale_ + static_cast<double>(direction_last_[j]) * last);
    }
}

DciQuery DciPoints::as_query(const float * values) const {
    DciQuery     query{std::vector<float>(padded_), 0, std::vector<float>(n_directions_)};
    const double length = std::sqrt(square(values, n_dims_));
    if (length > 0) {
        std::vector<float> unit(padded_);
        for (std::size_t i = 0; i < n_dims_; ++i) {
            unit[i]         = static_cast<float>(values[i] / length);
            query.vector[i] = static_cast<float>(values[i] / length / scale_);
        }
        for (std::size_t i = 0; i < n_directions_; ++i) {
            query.projections[i] = dot(*isa_, directions_.data() + i * padded_, unit.data(), padded_);
        }
    }
    return query;
}

DciQuery DciPoints::as_point(const DciKeys & keys, DciId id) const {
    DciQuery query{std::vector<float>(padded_), last_[static_cast<std::size_t>(id)], {}};
    read(keys, id, query.vector.data());
    for (float & value : query.vector) {
        value = static_cast<float>(value / (scale_ * scale_));
    }
    return query;
}

DciMean DciPoints::mean_of(const DciKeys & keys, const std::vector<DciId> & ids) const {
    DciMean             mean{{std::vector<float>(padded_), 0, {}}, 0};
    std::vector<double> total(n_dims_);
    Row                 row(padded_);
    double              last = 0, length = 0;
    for (const DciId id : ids) {
        read(keys, id, row.data());
        for (std::size_t d = 0; d < n_dims_; ++d) {
            total[d] += static_cast<double>(row.data()[d]);
        }
        last += static_cast<double>(last_[static_cast<std::size_t>(id)]);
    }
    const auto n = static_cast<double>(ids.size());
    for (std::size_t d = 0; d < n_dims_; ++d) {
        const double value   = total[d] / n / scale_;
        mean.query.vector[d] = static_cast<float>(value / scale_);
        length += value * value;
    }
    mean.query.last = static_cast<float>(last / n);
    mean.half       = static_cast<float>((length + last / n * (last / n)) / 2);
    return mean;
}

float DciPoints::nearness(const float * key, DciId id, const DciMean & mean) const {
    const float product = dot(*isa_, key, mean.query.vector.data(), padded_);
    return product + mean.query.last * last_[static_cast<std::size_t>(id)] - mean.half;
}

}  // namespace towerd
