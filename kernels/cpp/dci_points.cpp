#include "dci_points.h"

#include <algorithm>
#include <cmath>

namespace towerd {

namespace {

constexpr std::size_t kLanes    = 8;
constexpr double      kScaleMin = 1e-15;
constexpr double      kHeadroom = 1.25;  // of the scale, when a key longer than all before is added

// Eight running sums in a fixed order: every machine gets the same bits, with any vector width.
float dot(const float * a, const float * b, std::size_t n) {
    float sums[kLanes] = {};
    for (std::size_t i = 0; i < n; i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            sums[lane] += a[i + lane] * b[i + lane];
        }
    }
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

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

double DciPoints::square(const float * values) const {
    double sum = 0;
    for (std::size_t i = 0; i < n_dims_; ++i) {
        sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    }
    return sum;
}

float DciPoints::last_of(double square) const {
    return static_cast<float>(std::sqrt(std::max(0.0, 1.0 - square / (scale_ * scale_))));
}

float DciPoints::projected(const float * raw, std::size_t direction, float last) const {
    return static_cast<float>(static_cast<double>(*raw) / scale_ +
                              static_cast<double>(direction_last_[direction]) * static_cast<double>(last));
}

bool DciPoints::make_room(const float * keys, std::size_t n) {
    double longest = 0;
    for (std::size_t i = 0; i < n; ++i) {
        longest = std::max(longest, square(keys + i * n_dims_));
    }
    longest = std::sqrt(longest);
    if (scale_ >= longest && scale_ > 0) {
        return false;
    }
    scale_ = std::max(kScaleMin, size() == 0 ? longest : longest * kHeadroom);
    for (std::size_t i = 0; i < size(); ++i) {
        last_[i] = last_of(square_[i]);
        for (std::size_t j = 0; j < n_directions_; ++j) {
            const std::size_t at = i * n_directions_ + j;
            projection_[at]      = projected(&raw_[at], j, last_[i]);
        }
    }
    return true;
}

void DciPoints::add(const float * values) {
    keys_.resize(keys_.size() + padded_);
    float * row = keys_.data() + keys_.size() - padded_;
    std::copy_n(values, n_dims_, row);
    square_.push_back(square(values));
    last_.push_back(last_of(square_.back()));
    for (std::size_t j = 0; j < n_directions_; ++j) {
        raw_.push_back(dot(directions_.data() + j * padded_, row, padded_));
        projection_.push_back(projected(&raw_.back(), j, last_.back()));
    }
}

DciQuery DciPoints::as_query(const float * values) const {
    DciQuery     query{std::vector<float>(padded_), 0, std::vector<float>(n_directions_)};
    const double length = std::sqrt(square(values));
    if (length > 0) {
        std::vector<float> unit(padded_);
        for (std::size_t i = 0; i < n_dims_; ++i) {
            unit[i]         = static_cast<float>(values[i] / length);
            query.vector[i] = static_cast<float>(values[i] / length / scale_);
        }
        for (std::size_t i = 0; i < n_directions_; ++i) {
            query.projections[i] = dot(directions_.data() + i * padded_, unit.data(), padded_);
        }
    }
    return query;
}

DciQuery DciPoints::as_point(std::int64_t id) const {
    const auto at = static_cast<std::size_t>(id);
    DciQuery   query{std::vector<float>(padded_), last_[at], {}};
    for (std::size_t i = 0; i < n_dims_; ++i) {
        query.vector[i] = static_cast<float>(key(id)[i] / (scale_ * scale_));
    }
    const float * row = projection_.data() + at * n_directions_;
    query.projections.assign(row, row + n_directions_);
    return query;
}

DciMean DciPoints::mean_of(const std::vector<std::int64_t> & ids) const {
    DciMean             mean{{std::vector<float>(padded_), 0, {}}, 0};
    std::vector<double> total(n_dims_);
    double              last = 0, square = 0;
    for (const std::int64_t id : ids) {
        for (std::size_t d = 0; d < n_dims_; ++d) {
            total[d] += static_cast<double>(key(id)[d]);
        }
        last += static_cast<double>(last_[static_cast<std::size_t>(id)]);
    }
    const auto n = static_cast<double>(ids.size());
    for (std::size_t d = 0; d < n_dims_; ++d) {
        const double value   = total[d] / n / scale_;
        mean.query.vector[d] = static_cast<float>(value / scale_);
        square += value * value;
    }
    mean.query.last = static_cast<float>(last / n);
    mean.half       = static_cast<float>((square + last / n * (last / n)) / 2);
    return mean;
}

float DciPoints::nearness(std::int64_t id, const DciMean & mean) const {
    const float product = dot(key(id), mean.query.vector.data(), padded_);
    return product + mean.query.last * last_[static_cast<std::size_t>(id)] - mean.half;
}

}  // namespace towerd
