// SPDX-License-Identifier: Apache-2.0
// aclnnFlashAttentionScore and its gradient, for padded batches and for packed sequences (TND).
//
//     out = dropout(softmax(mask(scale * (pse + q k^T)))) v
//
// The softmax is computed in float32 over whole rows; the rows' maxima and sums leave the forward as CANN leaves them,
// repeated 8 times in the last dimension, and the gradient starts from them. q, k, v have one dtype.
#include <cmath>
#include <limits>

#include "op_nn_common.h"

using namespace vnpu;

namespace {

struct Mask {
  int64_t sparse_mode, pre_tokens, next_tokens;
};

struct Settings {
  std::string layout;
  int64_t heads;
  double scale, keep_prob;
  int64_t inner_precise;
  Mask mask;
};

// One attention problem: [B, N, S, D] views, whatever the layout of the memory is.
struct Problem {
  at::Tensor q, k, v;          // float32, k and v repeated to the heads of q
  at::Tensor pse, mask, keep;  // undefined where absent; mask is true where a score is left out
  at::Tensor sink;             // undefined, or one more score a row and head that takes weight and gives nothing
};

at::Tensor heads_first(const at::Tensor& x, const std::string& layout, int64_t heads) {
  if (layout == "BNSD") return x;
  if (layout == "BSND") return x.transpose(1, 2);
  if (layout == "BSH") return x.unflatten(2, {heads, x.size(2) / heads}).transpose(1, 2);
  return x.unflatten(2, {heads, x.size(2) / heads}).permute({1, 2, 0, 3});  // SBH
}

at::Tensor layout_of(const at::Tensor& x, const std::string& layout) {  // x is [B, N, S, D]
  if (layout == "BNSD") return x;
  if (layout == "BSND") return x.transpose(1, 2);
  if (layout == "BSH") return x.transpose(1, 2).flatten(2);
  return x.permute({2, 0, 1, 3}).flatten(2);  // SBH
}

int64_t kv_heads(const TensorArg& q, const TensorArg& k, const Settings& settings) {
  if (settings.layout == "BNSD") return k.size(1);
  if (settings.layout == "BSND") return k.size(2);
  const int64_t head_dim = q.size(2) / settings.heads;
  return head_dim == 0 ? 0 : k.size(2) / head_dim;
}

// True where a score is left out. Without a mask tensor CANN computes everything, whatever the sparse mode says.
at::Tensor left_out(const at::Tensor& mask, const Mask& how, int64_t q_length, int64_t kv_length) {
  if (!mask.defined()) return {};
  const at::Tensor rows = at::arange(q_length, at::kLong).unsqueeze(1), columns = at::arange(kv_length, at::kLong);
  const int64_t shift = kv_length - q_length;
  if (how.sparse_mode == 2) return columns > rows;
  if (how.sparse_mode == 3) return columns > rows + shift;
  if (how.sparse_mode == 4)
    return (columns > rows + shift + how.next_tokens) | (columns < rows + shift - how.pre_tokens);
  at::Tensor result = mask.to(at::kBool);
  if (how.sparse_mode == 0) {  // outside of the band nothing is computed
    const int64_t far = std::numeric_limits<int32_t>::max();
    if (how.next_tokens < far) result = result | (columns > rows + how.next_tokens);
    if (how.pre_tokens < far) result = result | (columns < rows - how.pre_tokens);
  }
  return result;
}

void check_mask(const OptIn& mask, const Mask& how, at::IntArrayRef scores) {  // scores: [B, N, S, S]
  check(how.sparse_mode >= 0 && how.sparse_mode <= 4, "sparseMode is ", how.sparse_mode,
        ", only 0 to 4 are implemented here");
  if (!mask) return;
  check(mask.dtype() == at::kBool || mask.dtype() == at::kByte, "attenMask has dtype ", dtype_name(mask.acl_dtype()),
        ", expected bool or uint8");
  const auto sizes = mask.sizes();
  if (how.sparse_mode >= 2) {
    check(mask.dim() >= 2 && mask.size(-1) == 2048 && mask.size(-2) == 2048, "attenMask has shape ", mask.shape(),
          ", expected the compressed mask of 2048 x 2048 with sparseMode ", how.sparse_mode);
    check(how.sparse_mode != 4 || how.pre_tokens + how.next_tokens >= 0, "preTokens ", how.pre_tokens,
          " and nextTokens ", how.next_tokens, " leave no band");
    return;
  }
  const bool two = mask.dim() == 2, four = mask.dim() == 4;
  check((two || four) && mask.size(-2) == scores[2] && mask.size(-1) == scores[3] &&
            (two || (sizes[0] == scores[0] && (sizes[1] == scores[1] || sizes[1] == 1)) ||
             (sizes[0] == 1 && sizes[1] == 1)),
        "attenMask has shape ", mask.shape(), " for scores of shape ", shape_text(scores));
}

void check_common(const In& q, const In& k, const In& v, const OptIn& pse, const OptIn& drop, const OptIn& padding,
                  const Settings& settings) {
  check_floating(q);
  check(q.acl_dtype() == k.acl_dtype() && q.acl_dtype() == v.acl_dtype(), "query, key and value have dtypes ",
        dtype_name(q.acl_dtype()), ", ", dtype_name(k.acl_dtype()), " and ", dtype_name(v.acl_dtype()));
  check(q.dim() == k.dim() && q.dim() == v.dim(), "query, key and value have shapes ", q.shape(), ", ", k.shape(),
        " and ", v.shape());
  check(settings.heads > 0, "headNum is ", settings.heads);
  check(settings.keep_prob > 0 && settings.keep_prob <= 1, "keepProb is ", settings.keep_prob);
  check(!padding || padding.numel() == 0, "paddingMask is not supported");
  check(settings.inner_precise >= 0 && settings.inner_precise <= 4, "innerPrecise is ", settings.inner_precise);
  check(settings.keep_prob == 1 || drop, "keepProb is ", settings.keep_prob, ", but there is no dropMask");
  if (drop) check(drop.dtype() == at::kByte, "dropMask has dtype ", dtype_name(drop.acl_dtype()), ", expected uint8");
  if (pse) check(pse.acl_dtype() == q.acl_dtype() && pse.dim() == 4, "realShift has shape ", pse.shape(),
                 " and dtype ", dtype_name(pse.acl_dtype()));
}

// [B, N, S, S] of a padded batch, after the checks.
std::vector<int64_t> check_padded(const In& q, const In& k, const In& v, const OptIn& pse, const OptIn& drop,
                                  const OptIn& padding, const OptIn& mask, const Ints& prefix,
                                  const Settings& settings) {
  check_common(q, k, v, pse, drop, padding, settings);
  check(prefix.empty(), "prefix is not implemented here");
  const std::string& layout = settings.layout;
  const bool four = layout == "BNSD" || layout == "BSND";
  check(four || layout == "BSH" || layout == "SBH", "inputLayout is '", layout, "', expected BNSD, BSND, BSH or SBH");
  check(q.dim() == (four ? 4 : 3), "query has shape ", q.shape(), " with inputLayout ", layout);
  const int batch_dim = layout == "SBH" ? 1 : 0, row_dim = layout == "BNSD" ? 2 : layout == "SBH" ? 0 : 1;
  const int64_t batch = q.size(batch_dim), rows = q.size(row_dim), columns = k.size(row_dim);
  const int64_t q_heads = four ? q.size(layout == "BNSD" ? 1 : 2) : settings.heads;
  check(q_heads == settings.heads, "headNum is ", settings.heads, ", but query has shape ", q.shape());
  if (four) {
    check(q.size(3) == k.size(3), "the heads of query and key have sizes ", q.size(3), " and ", k.size(3));
  } else {
    check(q.size(2) % settings.heads == 0, "query has shape ", q.shape(), ", not ", settings.heads, " heads");
  }
  const int64_t groups = kv_heads(q, k, settings);
  check(groups > 0 && q_heads % groups == 0, "query has ", q_heads, " heads, no multiple of the ", groups,
        " of key");
  check(k.size(batch_dim) == batch && v.size(batch_dim) == batch && v.size(row_dim) == columns,
        "query, key and value have shapes ", q.shape(), ", ", k.shape(), " and ", v.shape());
  std::vector<int64_t> scores{batch, q_heads, rows, columns};
  check_mask(mask, settings.mask, scores);
  if (pse)
    check((pse.size(0) == batch || pse.size(0) == 1) && pse.size(1) == q_heads &&
              (pse.size(2) == rows || pse.size(2) == 1) && pse.size(3) == columns,
          "realShift has shape ", pse.shape(), " for scores of shape ", shape_text(scores));
  if (drop)
    check(drop.numel() * 8 >= batch * q_heads * rows * columns, "dropMask has ", drop.numel() * 8,
          " bits for scores of shape ", shape_text(scores));
  return scores;
}

at::Tensor keep_of(const at::Tensor& drop, int64_t first, at::IntArrayRef scores) {
  if (!drop.defined()) return {};
  const int64_t count = c10::multiply_integers(scores);
  const at::Tensor bits = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte);
  return drop.reshape({-1, 1}).bitwise_and(bits).ne(0).reshape({-1}).narrow(0, first, count).view(scores);
}

at::Tensor repeat_heads(const at::Tensor& x, int64_t heads) {
  return x.size(1) == heads ? x : x.repeat_interleave(heads / x.size(1), 1);
}

at::Tensor sum_heads(const at::Tensor& x, int64_t groups) {
  return x.size(1) == groups ? x : x.unflatten(1, {groups, x.size(1) / groups}).sum(2);
}

at::Tensor masked_scores(const Problem& p, const Settings& settings) {
  at::Tensor scores = at::matmul(p.q, p.k.transpose(2, 3));
  if (p.pse.defined()) scores = scores + p.pse;
  scores = scores * settings.scale;
  // The kernel takes the most negative float, so that a row that is left out whole is no NaN.
  if (p.mask.defined()) scores = scores.masked_fill(p.mask, std::numeric_limits<float>::lowest());
  return scores;
}

// Rows that are left out whole give zeros where innerPrecise 2 asks for it or the sparse mode tells CANN that there are
// such rows. Else they give the mean of v, as the formula has it.
at::Tensor without_dead_rows(const at::Tensor& weights, const Problem& p, const Settings& settings) {
  const bool known = settings.inner_precise == 2 || settings.mask.sparse_mode >= 2;
  return p.mask.defined() && known ? weights.masked_fill(p.mask.all(-1, true), 0) : weights;
}

struct Forward {
  at::Tensor out, row_max, row_sum;  // [B, N, S, D], [B, N, S, 1]
};

Forward forward(const Problem& p, const Settings& settings) {
  const at::Tensor scores = masked_scores(p, settings);
  at::Tensor row_max = scores.amax(-1, true);
  if (p.sink.defined()) row_max = at::maximum(row_max, p.sink);
  at::Tensor weights = at::exp(scores - row_max);
  at::Tensor row_sum = weights.sum(-1, true);
  if (p.sink.defined()) row_sum = row_sum + at::exp(p.sink - row_max);
  weights = without_dead_rows(weights / row_sum, p, settings);
  if (p.keep.defined()) weights = weights * p.keep / settings.keep_prob;
  return {at::matmul(weights, p.v), row_max, row_sum};
}

struct Backward {
  at::Tensor dq, dk, dv, dpse, dsink;
};

Backward backward(const Problem& p, const at::Tensor& dy, const at::Tensor& out, const at::Tensor& row_max,
                  const at::Tensor& row_sum, const Settings& settings) {
  const at::Tensor weights = without_dead_rows(at::exp(masked_scores(p, settings) - row_max) / row_sum, p, settings);
  at::Tensor kept = weights, d_weights = at::matmul(dy, p.v.transpose(2, 3));
  if (p.keep.defined()) {
    kept = weights * p.keep / settings.keep_prob;
    d_weights = d_weights * p.keep / settings.keep_prob;
  }
  const at::Tensor mean = (dy * out).sum(-1, true);
  const at::Tensor d_scores = weights * (d_weights - mean) * settings.scale;
  at::Tensor dsink;
  if (p.sink.defined()) dsink = -(at::exp(p.sink - row_max) / row_sum * mean).sum({0, 2, 3});
  return {at::matmul(d_scores, p.k), at::matmul(d_scores.transpose(2, 3), p.q), at::matmul(kept.transpose(2, 3), dy),
          d_scores, dsink};
}

at::Tensor as_float(const at::Tensor& x) { return x.defined() ? x.to(at::kFloat) : x; }

Problem padded(const In& q, const In& k, const In& v, const OptIn& pse, const OptIn& drop, const OptIn& mask,
               const OptIn& sink, const Settings& settings, at::IntArrayRef scores, int64_t groups) {
  auto load = [&](const In& x, int64_t heads) { return as_float(heads_first(x(), settings.layout, heads)); };
  return {load(q, settings.heads), repeat_heads(load(k, groups), settings.heads),
          repeat_heads(load(v, groups), settings.heads), as_float(pse()),
          left_out(mask(), settings.mask, scores[2], scores[3]), keep_of(drop(), 0, scores),
          sink ? sink().view({1, -1, 1, 1}) : at::Tensor()};
}

void check_sink(const OptIn& sink, int64_t heads) {
  if (sink) check(sink.dtype() == at::kFloat && sink.numel() == heads, "sink has shape ", sink.shape(), " and dtype ",
                  dtype_name(sink.acl_dtype()), ", expected float32, one value for each of ", heads, " heads");
}

void check_usual_shift(int64_t pse_type, const Ints& q_start, const Ints& kv_start) {
  check(pse_type == 1, "pseType is ", pse_type, ", only 1 is implemented here");
  check(q_start.empty() && kv_start.empty(), "qStartIdx and kvStartIdx are not implemented here");
}

Work padded_forward(const In& q, const In& k, const In& v, const OptIn& pse, const OptIn& drop, const OptIn& padding,
                    const OptIn& mask, const OptIn& sink, const Ints& prefix, const Settings& settings,
                    const Out& row_max, const Out& row_sum, const Out& out) {
  const auto scores = check_padded(q, k, v, pse, drop, padding, mask, prefix, settings);
  const int64_t groups = kv_heads(q, k, settings);
  check_sink(sink, settings.heads);
  const std::vector<int64_t> shape{scores[0], scores[1], scores[2], 8};
  check(row_max.sizes() == shape && row_sum.sizes() == shape, "softmaxMax has shape ", row_max.shape(), ", expected ",
        shape_text(shape));
  return [=] {
    if (out.numel() == 0) return;
    const Forward f = forward(padded(q, k, v, pse, drop, mask, sink, settings, scores, groups), settings);
    row_max.set(f.row_max.expand(shape));
    row_sum.set(f.row_sum.expand(shape));
    out.set(layout_of(f.out, settings.layout));
  };
}

Work padded_backward(const In& q, const In& k, const In& v, const In& dy, const OptIn& pse, const OptIn& drop,
                     const OptIn& padding, const OptIn& mask, const OptIn& sink, const In& row_max, const In& row_sum,
                     const In& out, const Ints& prefix, const Settings& settings, const Out& dq, const Out& dk,
                     const Out& dv, const OptOut& dpse, const OptOut& dsink) {
  const auto scores = check_padded(q, k, v, pse, drop, padding, mask, prefix, settings);
  const int64_t groups = kv_heads(q, k, settings);
  check_sink(sink, settings.heads);
  check_same_shape(dy, out);
  check_same_dtype(dy, q);
  check(row_max.numel() == scores[0] * scores[1] * scores[2] * 8 && row_sum.numel() == row_max.numel(),
        "softmaxMax has shape ", row_max.shape(), " for scores of shape ", shape_text(scores));
  return [=] {
    if (q.numel() == 0 || k.numel() == 0) return;
    auto rows = [&](const In& x) { return as_float(heads_first(x(), settings.layout, settings.heads)); };
    const Backward b = backward(padded(q, k, v, pse, drop, mask, sink, settings, scores, groups), rows(dy), rows(out),
                                row_max().narrow(3, 0, 1), row_sum().narrow(3, 0, 1), settings);
    dq.set(layout_of(b.dq, settings.layout));
    dk.set(layout_of(sum_heads(b.dk, groups), settings.layout));
    dv.set(layout_of(sum_heads(b.dv, groups), settings.layout));
    if (pse && dpse) dpse.set(at::sum_to(b.dpse, pse.sizes()));
    if (sink && dsink) dsink.set(b.dsink.reshape(dsink.sizes()));
  };
}

// Packed sequences: q is [T, N, D], the lengths are cumulative.
struct Packed {
  int64_t q_first, q_length, kv_first, kv_length, drop_first;
};

std::vector<Packed> sequences(const std::vector<int64_t>& q_ends, const std::vector<int64_t>& kv_ends, int64_t heads) {
  std::vector<Packed> result;
  int64_t q_first = 0, kv_first = 0, drop_first = 0;
  for (size_t i = 0; i < q_ends.size(); ++i) {
    result.push_back({q_first, q_ends[i] - q_first, kv_first, kv_ends[i] - kv_first, drop_first});
    drop_first += heads * result.back().q_length * result.back().kv_length;
    q_first = q_ends[i], kv_first = kv_ends[i];
  }
  return result;
}

std::vector<Packed> check_packed(const In& q, const In& k, const In& v, const OptIn& pse, const OptIn& drop,
                                 const OptIn& padding, const OptIn& mask, const Ints& prefix, const Ints& q_ends,
                                 const Ints& kv_ends, const Settings& settings) {
  check_common(q, k, v, pse, drop, padding, settings);
  check(settings.layout == "TND", "inputLayout is '", settings.layout, "', expected TND");
  check(!pse, "realShift is not implemented here with inputLayout TND");
  check(prefix.empty(), "prefix is not implemented here");
  check(q.dim() == 3 && q.size(1) == settings.heads && q.size(2) == k.size(2) && k.size(0) == v.size(0) &&
            k.size(1) == v.size(1) && k.size(1) > 0 && settings.heads % k.size(1) == 0,
        "query, key and value have shapes ", q.shape(), ", ", k.shape(), " and ", v.shape(), " with headNum ",
        settings.heads);
  check(!q_ends.empty() && q_ends.size() == kv_ends.size(), "actualSeqQLen has ", q_ends.size(),
        " values, actualSeqKvLen ", kv_ends.size());
  for (const Ints* ends : {&q_ends, &kv_ends}) {
    const int64_t total = ends == &q_ends ? q.size(0) : k.size(0);
    int64_t last = 0;
    for (int64_t end : (*ends)()) {
      check(end >= last && end <= total, "actualSeqQLen or actualSeqKvLen is ", shape_text((*ends)()),
            ", expected values that do not decrease and are at most ", total);
      last = end;
    }
  }
  const std::vector<Packed> result = sequences(q_ends().vec(), kv_ends().vec(), settings.heads);
  int64_t longest_q = 0, longest_kv = 0, bits = 0;
  for (const Packed& s : result) {
    longest_q = std::max(longest_q, s.q_length), longest_kv = std::max(longest_kv, s.kv_length);
    bits = s.drop_first + settings.heads * s.q_length * s.kv_length;
  }
  if (mask && settings.mask.sparse_mode < 2) {
    check(mask.dim() == 2 && mask.size(0) >= longest_q && mask.size(1) >= longest_kv, "attenMask has shape ",
          mask.shape(), ", the longest sequences have ", longest_q, " and ", longest_kv);
    check_mask(OptIn("attenMask", nullptr), settings.mask, {});
  } else {
    check_mask(mask, settings.mask, {1, settings.heads, longest_q, longest_kv});
  }
  if (drop) check(drop.numel() * 8 >= bits, "dropMask has ", drop.numel() * 8, " bits, expected ", bits);
  return result;
}

Problem packed(const Packed& s, const In& q, const In& k, const In& v, const OptIn& drop, const OptIn& mask,
               const Settings& settings) {
  auto load = [](const In& x, int64_t first, int64_t length) {
    return as_float(x().narrow(0, first, length)).transpose(0, 1).unsqueeze(0);
  };
  at::Tensor left = mask();
  if (left.defined() && settings.mask.sparse_mode < 2) left = left.narrow(0, 0, s.q_length).narrow(1, 0, s.kv_length);
  return {load(q, s.q_first, s.q_length), repeat_heads(load(k, s.kv_first, s.kv_length), settings.heads),
          repeat_heads(load(v, s.kv_first, s.kv_length), settings.heads), at::Tensor(),
          left_out(left, settings.mask, s.q_length, s.kv_length),
          keep_of(drop(), s.drop_first, {1, settings.heads, s.q_length, s.kv_length}), at::Tensor()};
}

// The rows' statistics of one packed sequence as a [N, S, 8] view: either the memory is [T, N, 8], as the query is, or
// (CANN's default) the sequences lie one behind the other, each as [N, S, 8].
at::Tensor statistics(const at::Tensor& all, const Packed& s, int64_t heads, bool same_as_input) {
  if (same_as_input) return all.narrow(0, s.q_first, s.q_length).transpose(0, 1);
  return all.reshape({-1}).narrow(0, s.q_first * heads * 8, s.q_length * heads * 8).view({heads, s.q_length, 8});
}

Work packed_forward(const In& q, const In& k, const In& v, const OptIn& pse, const OptIn& drop, const OptIn& padding,
                    const OptIn& mask, const Ints& prefix, const Ints& q_ends, const Ints& kv_ends,
                    const Settings& settings, bool same_as_input, const Out& row_max, const Out& row_sum,
                    const Out& out) {
  const auto parts = check_packed(q, k, v, pse, drop, padding, mask, prefix, q_ends, kv_ends, settings);
  return [=] {
    at::Tensor all_max = row_max(), all_sum = row_sum(), all_out = out();
    for (const Packed& s : parts) {
      if (s.q_length == 0 || s.kv_length == 0) continue;
      const Forward f = forward(packed(s, q, k, v, drop, mask, settings), settings);
      statistics(all_max, s, settings.heads, same_as_input).copy_(f.row_max[0]);
      statistics(all_sum, s, settings.heads, same_as_input).copy_(f.row_sum[0]);
      all_out.narrow(0, s.q_first, s.q_length).copy_(f.out[0].transpose(0, 1));
    }
  };
}

Work packed_backward(const In& q, const In& k, const In& v, const In& dy, const OptIn& pse, const OptIn& drop,
                     const OptIn& padding, const OptIn& mask, const In& row_max, const In& row_sum, const In& out,
                     const Ints& prefix, const Ints& q_ends, const Ints& kv_ends, const Settings& settings,
                     bool same_as_input, const Out& dq, const Out& dk, const Out& dv) {
  const auto parts = check_packed(q, k, v, pse, drop, padding, mask, prefix, q_ends, kv_ends, settings);
  check_same_shape(dy, out);
  return [=] {
    at::Tensor grad_q = at::zeros(q.sizes(), at::kFloat), grad_k = at::zeros(k.sizes(), at::kFloat),
               grad_v = at::zeros(v.sizes(), at::kFloat);
    for (const Packed& s : parts) {
      if (s.q_length == 0 || s.kv_length == 0) continue;
      auto rows = [&](const In& x) {
        return as_float(x().narrow(0, s.q_first, s.q_length)).transpose(0, 1).unsqueeze(0);
      };
      auto stats = [&](const In& x) {
        return statistics(x(), s, settings.heads, same_as_input).narrow(2, 0, 1).unsqueeze(0);
      };
      const Backward b = backward(packed(s, q, k, v, drop, mask, settings), rows(dy), rows(out), stats(row_max),
                                  stats(row_sum), settings);
      grad_q.narrow(0, s.q_first, s.q_length).copy_(b.dq[0].transpose(0, 1));
      grad_k.narrow(0, s.kv_first, s.kv_length).copy_(sum_heads(b.dk, k.size(1))[0].transpose(0, 1));
      grad_v.narrow(0, s.kv_first, s.kv_length).copy_(sum_heads(b.dv, v.size(1))[0].transpose(0, 1));
    }
    dq.set(grad_q);
    dk.set(grad_k);
    dv.set(grad_v);
  };
}

bool same_as_input(const std::string& layout) {
  check(layout.empty() || layout == "same_as_input", "softmaxOutLayout is '", layout,
        "', expected '' or 'same_as_input'");
  return !layout.empty();
}

}  // namespace

VNPU_OP(aclnnFlashAttentionScore, In(query), In(key), In(value), OptIn(realShift), OptIn(dropMask), OptIn(paddingMask),
        OptIn(attenMask), Ints(prefix), Double(scaleValue), Double(keepProb), Int(preTokens), Int(nextTokens),
        Int(headNum), Str(inputLayout), Int(innerPrecise), Int(sparseMode), Out(softmaxMax), Out(softmaxSum),
        OptOut(softmaxOut), Out(attentionOut)) {
  const Settings settings{inputLayout(), headNum, scaleValue, keepProb, innerPrecise,
                          {sparseMode, preTokens, nextTokens}};
  return padded_forward(query, key, value, realShift, dropMask, paddingMask, attenMask, OptIn("sink", nullptr), prefix,
                        settings, softmaxMax, softmaxSum, attentionOut);
}

VNPU_OP(aclnnFlashAttentionScoreV3, In(query), In(key), In(value), OptIn(realShift), OptIn(dropMask),
        OptIn(paddingMask), OptIn(attenMask), OptIn(sink), Ints(prefix), Ints(qStartIdx), Ints(kvStartIdx),
        Double(scaleValue), Double(keepProb), Int(preTokens), Int(nextTokens), Int(headNum), Str(inputLayout),
        Int(innerPrecise), Int(sparseMode), Int(pseType), Out(softmaxMax), Out(softmaxSum), OptOut(softmaxOut),
        Out(attentionOut)) {
  const Settings settings{inputLayout(), headNum, scaleValue, keepProb, innerPrecise,
                          {sparseMode, preTokens, nextTokens}};
  check_usual_shift(pseType, qStartIdx, kvStartIdx);
  return padded_forward(query, key, value, realShift, dropMask, paddingMask, attenMask, sink, prefix, settings,
                        softmaxMax, softmaxSum, attentionOut);
}

VNPU_OP(aclnnFlashAttentionScoreGrad, In(query), In(key), In(value), In(dy), OptIn(pseShift), OptIn(dropMask),
        OptIn(paddingMask), OptIn(attenMask), In(softmaxMax), In(softmaxSum), OptIn(softmaxIn), In(attentionIn),
        Ints(prefix), Double(scaleValue), Double(keepProb), Int(preTokens), Int(nextTokens), Int(headNum),
        Str(inputLayout), Int(innerPrecise), Int(sparseMode), Out(dqOut), Out(dkOut), Out(dvOut), OptOut(dpseOut)) {
  const Settings settings{inputLayout(), headNum, scaleValue, keepProb, innerPrecise,
                          {sparseMode, preTokens, nextTokens}};
  return padded_backward(query, key, value, dy, pseShift, dropMask, paddingMask, attenMask, OptIn("sink", nullptr),
                         softmaxMax, softmaxSum, attentionIn, prefix, settings, dqOut, dkOut, dvOut, dpseOut,
                         OptOut("dsink", nullptr));
}

VNPU_OP(aclnnFlashAttentionScoreGradV3, In(query), In(key), In(value), In(dy), OptIn(pseShift), OptIn(dropMask),
        OptIn(paddingMask), OptIn(attenMask), In(softmaxMax), In(softmaxSum), OptIn(softmaxIn), In(attentionIn),
        OptIn(sink), Ints(prefix), Ints(qStartIdx), Ints(kvStartIdx), Double(scaleValue), Double(keepProb),
        Int(preTokens), Int(nextTokens), Int(headNum), Str(inputLayout), Int(innerPrecise), Int(sparseMode),
        Int(pseType), Out(dqOut), Out(dkOut), Out(dvOut), OptOut(dpseOut), OptOut(dsinkOut)) {
  const Settings settings{inputLayout(), headNum, scaleValue, keepProb, innerPrecise,
                          {sparseMode, preTokens, nextTokens}};
  check_usual_shift(pseType, qStartIdx, kvStartIdx);
  return padded_backward(query, key, value, dy, pseShift, dropMask, paddingMask, attenMask, sink, softmaxMax,
                         softmaxSum, attentionIn, prefix, settings, dqOut, dkOut, dvOut, dpseOut, dsinkOut);
}

VNPU_OP(aclnnFlashAttentionVarLenScore, In(query), In(key), In(value), OptIn(realShift), OptIn(dropMask),
        OptIn(paddingMask), OptIn(attenMask), Ints(prefix), Ints(actualSeqQLen), Ints(actualSeqKvLen),
        Double(scaleValue), Double(keepProb), Int(preTokens), Int(nextTokens), Int(headNum), Str(inputLayout),
        Int(innerPrecise), Int(sparseMode), Out(softmaxMax), Out(softmaxSum), OptOut(softmaxOut), Out(attentionOut)) {
  const Settings settings{inputLayout(), headNum, scaleValue, keepProb, innerPrecise,
                          {sparseMode, preTokens, nextTokens}};
  return packed_forward(query, key, value, realShift, dropMask, paddingMask, attenMask, prefix, actualSeqQLen,
                        actualSeqKvLen, settings, false, softmaxMax, softmaxSum, attentionOut);
}

VNPU_OP(aclnnFlashAttentionVarLenScoreV4, In(query), In(key), In(value), OptIn(realShift), OptIn(dropMask),
        OptIn(paddingMask), OptIn(attenMask), Ints(prefix), Ints(actualSeqQLen), Ints(actualSeqKvLen),
        Double(scaleValue), Double(keepProb), Int(preTokens), Int(nextTokens), Int(headNum), Str(inputLayout),
        Int(innerPrecise), Int(sparseMode), Str(softmaxOutLayout), Out(softmaxMax), Out(softmaxSum),
        OptOut(softmaxOut), Out(attentionOut)) {
  const Settings settings{inputLayout(), headNum, scaleValue, keepProb, innerPrecise,
                          {sparseMode, preTokens, nextTokens}};
  return packed_forward(query, key, value, realShift, dropMask, paddingMask, attenMask, prefix, actualSeqQLen,
                        actualSeqKvLen, settings, same_as_input(softmaxOutLayout), softmaxMax, softmaxSum,
                        attentionOut);
}

VNPU_OP(aclnnFlashAttentionUnpaddingScoreGrad, In(query), In(key), In(value), In(dy), OptIn(pseShift), OptIn(dropMask),
        OptIn(paddingMask), OptIn(attenMask), In(softmaxMax), In(softmaxSum), OptIn(softmaxIn), In(attentionIn),
        Ints(prefix), Ints(actualSeqQLen), Ints(actualSeqKvLen), Double(scaleValue), Double(keepProb), Int(preTokens),
        Int(nextTokens), Int(headNum), Str(inputLayout), Int(innerPrecise), Int(sparseMode), Out(dqOut), Out(dkOut),
        Out(dvOut), OptOut(dpseOut)) {
  const Settings settings{inputLayout(), headNum, scaleValue, keepProb, innerPrecise,
                          {sparseMode, preTokens, nextTokens}};
  return packed_backward(query, key, value, dy, pseShift, dropMask, paddingMask, attenMask, softmaxMax, softmaxSum,
                         attentionIn, prefix, actualSeqQLen, actualSeqKvLen, settings, false, dqOut, dkOut, dvOut);
}

VNPU_OP(aclnnFlashAttentionUnpaddingScoreGradV4, In(query), In(key), In(value), In(dy), OptIn(pseShift),
        OptIn(dropMask), OptIn(paddingMask), OptIn(attenMask), In(softmaxMax), In(softmaxSum), OptIn(softmaxIn),
        In(attentionIn), Ints(prefix), Ints(actualSeqQLen), Ints(actualSeqKvLen), Double(scaleValue),
        Double(keepProb), Int(preTokens), Int(nextTokens), Int(headNum), Str(inputLayout), Int(innerPrecise),
        Int(sparseMode), Out(dqOut), Out(dkOut), Out(dvOut), OptOut(dpseOut), Str(softmaxInLayout)) {
  const Settings settings{inputLayout(), headNum, scaleValue, keepProb, innerPrecise,
                          {sparseMode, preTokens, nextTokens}};
  return packed_backward(query, key, value, dy, pseShift, dropMask, paddingMask, attenMask, softmaxMax, softmaxSum,
                         attentionIn, prefix, actualSeqQLen, actualSeqKvLen, settings,
                         same_as_input(softmaxInLayout), dqOut, dkOut, dvOut);
}
