// The equations of farfield.ops for one head: summarize, merge, respond, and rows of the implied attention matrix.
// An operator has the names of its functions in farfield.ops.table. A grid has `size` [height, width], `keys` and
// `queries` (one Float64Array of positions per channel; queries are multiplied by the scale), and `values` (the same).
"use strict";

const dot = (a, b) => a.reduce((sum, number, index) => sum + number * b[index], 0);
const at = (rows, position) => rows.map((row) => row[position]);

function softmax(numbers) {
  const peak = Math.max(...numbers);
  const parts = numbers.map((number) => Math.exp(number - peak));
  const sum = parts.reduce((a, b) => a + b, 0);
  return parts.map((part) => part / sum);
}

// ---- features of a query or key ------------------------------------------------------------------------------------
const FEATURES = {
  identity: (vector) => vector,
  relu: (vector) => vector.map((number) => Math.max(0, number)),
  elu_plus_one: (vector) => vector.map((number) => (number > 0 ? number + 1 : Math.exp(number))),
  softmax_pair: (vector) => [...softmax(vector), ...softmax(vector.map((number) => -number))],
};

// ---- basis(key) -> the weight of a key in each slot; exponents where the operator has exponentials -----------------
const BASIS = {
  keys: (key) => key,
  exponentials: (key) => key,
  one: () => [1],
  one_and_key: (key) => [1, key[0]],
  Features: (key, operator) => [...FEATURES[operator.features](key), ...(operator.one ? [1] : [])],
};

// ---- coefficients(query, summary) -> how a query combines the slots ------------------------------------------------
// The features of a query times the mean of those of the keys and 1/√d, channel by channel.
const shares = (query, summary, operator) => FEATURES[operator.features](query).map((number, slot) =>
  (number * summary.weights[slot]) / Math.max(1, summary.count) / Math.sqrt(query.length));
const sumOf = (numbers) => numbers.reduce((a, b) => a + b, 0);
const COEFFICIENTS = {
  Quotient(query, summary, operator) {
    const parts = FEATURES[operator.features](query).map((number, slot) => number * summary.weights[slot]);
    const total = sumOf(parts);
    return parts.map((part) => (total ? part / (total + operator.epsilon) : 0));
  },
  centred: (query, summary, operator) =>
    [...query.map((number) => number / Math.sqrt(query.length)), 1 - sumOf(shares(query, summary, operator))],
  magnitude_aware(query, summary, operator) {
    const parts = shares(query, summary, operator), z = sumOf(parts);
    return [...parts.map((part) => part * (1 + 1 / (z + 1e-6))), -z];
  },
  queries: (query) => query,
  softmax_over_channels: (query) => softmax(query),
  query_and_one: (query) => [query[0], 1],
  products: (query, summary) => summary.keys.map((key) => dot(key, query)),
  softmax_of_products(query, summary) {
    const held = summary.weights.map((weight) => weight > 0);
    if (!held.some(Boolean)) return summary.weights.map(() => 0);
    const products = summary.keys.map((key, slot) =>
      held[slot] ? dot(key, query) / summary.weights[slot] : -Infinity);
    return softmax(products);
  },
};

// ---- the divisor of a slot's sum -----------------------------------------------------------------------------------
const PER = {
  weight: (query, summary, slot) => summary.weights[slot] || 1,
  position: (query, summary) => Math.max(1, summary.count),
  channel: (query) => query.length,
};

// ---- where keys, values and queries come from ----------------------------------------------------------------------
const indices = (size, position) => [Math.floor(position / size[1]), position % size[1]];
const axisSlots = (size, position) => {
  const [row, column] = indices(size, position);
  return [row, size[0] + column];
};
const windowSlot = (size, position) => {
  const [row, column] = indices(size, position);
  return (row >> 1) * Math.ceil(size[1] / 2) + (column >> 1);
};

function slotsOf(operator, size, position) {
  return operator.keys_from === "axes" ? axisSlots(size, position) : [windowSlot(size, position)];
}

// Summarize the valid positions of a list: sums over positions of basis(key) times value.
function summarize(operator, grid, valid, positions) {
  const channels = grid.values.length, depth = grid.keys.length;
  const slot = () => ({ values: new Array(channels).fill(0), keys: new Array(depth).fill(0), weight: 0, peak: -Infinity });
  const summary = { values: [], weights: [], keys: [], peak: null, members: [], count: 0 };
  const add = (index, weight, key, value) => {
    const kept = (held[index] ??= slot());
    kept.weight += weight;
    value.forEach((number, channel) => (kept.values[channel] += weight * number));
    key.forEach((number, channel) => (kept.keys[channel] += number));
  };
  const held = [];
  for (const position of positions) {
    if (!valid[position]) continue;
    summary.count += 1;
    const key = at(grid.keys, position), value = at(grid.values, position);
    if (operator.basis) {
      const weights = BASIS[operator.basis](key, operator);
      if (operator.basis !== "exponentials") weights.forEach((weight, index) => add(index, weight, [], value));
      else weights.forEach((exponent, index) => {
        const kept = (held[index] ??= slot()), peak = Math.max(kept.peak, exponent);
        rescale(kept, peak);
        add(index, Math.exp(exponent - peak), [], value);
      });
    } else if (operator.keys_from === "all") {
      held.push({ values: value, keys: key, weight: 1, peak: 0 });
      summary.members.push(position);
    } else if (operator.keys_from === "axes") {
      for (const index of axisSlots(grid.size, position)) add(index, 1, key, value);
    } else {
      const index = windowSlot(grid.size, position), kept = held[index];
      const most = (mine, other) => mine.map((number, channel) => Math.max(number, other[channel]));
      held[index] = kept
        ? { values: most(kept.values, value), keys: most(kept.keys, key), weight: 1, peak: 0 }
        : { values: value, keys: key, weight: 1, peak: 0 };
    }
  }
  const length = { axes: grid.size[0] + grid.size[1], windows: Math.ceil(grid.size[0] / 2) * Math.ceil(grid.size[1] / 2) };
  const slots = operator.basis ? held : Array.from({ length: length[operator.keys_from] ?? held.length }, (_, i) => held[i] ?? slot());
  summary.values = slots.map((one) => one.values);
  summary.keys = slots.map((one) => one.keys);
  summary.weights = slots.map((one) => one.weight);
  summary.peak = operator.basis === "exponentials" ? slots.map((one) => one.peak) : null;
  return summary;
}

function rescale(kept, peak) {
  const factor = kept.peak === -Infinity ? 0 : Math.exp(kept.peak - peak);
  kept.weight *= factor;
  kept.values = kept.values.map((number) => number * factor);
  kept.peak = peak;
}

// Merge the summaries of two parts of a grid: slots are concatenated where each position is one, else added.
function merge(operator, one, other) {
  const sum = (a, b) => a.map((number, index) => number + b[index]);
  const count = one.count + other.count;
  if (!operator.basis && operator.keys_from !== "axes") {
    if (operator.keys_from === "all") {
      const join = (name) => one[name].concat(other[name]);
      return { values: join("values"), keys: join("keys"), weights: join("weights"), members: join("members"), peak: null, count };
    }
    // A tile begins at an even row and column, so that each window lies in one tile.
    const take = (name) => one[name].map((mine, slot) => (one.weights[slot] ? mine : other[name][slot]));
    return { values: take("values"), keys: take("keys"), weights: take("weights"), members: [], peak: null, count };
  }
  if (!one.values.length || !other.values.length) return { ...(one.values.length ? one : other), count };
  if (one.peak) {
    const parts = [one, other].map((part) => part.weights.map((weight, slot) => ({ values: part.values[slot], weight, peak: part.peak[slot] })));
    const peak = one.peak.map((mine, slot) => Math.max(mine, other.peak[slot]));
    parts.forEach((part) => part.forEach((kept, slot) => rescale(kept, peak[slot])));
    const [mine, theirs] = parts;
    return {
      values: mine.map((kept, slot) => sum(kept.values, theirs[slot].values)),
      weights: mine.map((kept, slot) => kept.weight + theirs[slot].weight),
      keys: one.keys, members: [], peak, count,
    };
  }
  return {
    values: one.values.map((mine, slot) => sum(mine, other.values[slot])),
    keys: one.keys.map((mine, slot) => sum(mine, other.keys[slot])),
    weights: sum(one.weights, other.weights), members: [], peak: null, count,
  };
}

// ---- responses and rows --------------------------------------------------------------------------------------------
const queryAt = (grid, valid, position) => at(grid.queries, position).map((number) => (valid[position] ? number : 0));

// The mean query of each index of each axis, and its number of valid positions.
function axisQueries(operator, grid, valid) {
  const slots = Array.from({ length: grid.size[0] + grid.size[1] }, () => ({ sum: new Array(grid.queries.length).fill(0), count: 0 }));
  for (let position = 0; position < valid.length; position++) {
    if (!valid[position]) continue;
    const query = at(grid.queries, position);
    for (const index of axisSlots(grid.size, position)) {
      slots[index].count += 1;
      query.forEach((number, channel) => (slots[index].sum[channel] += number));
    }
  }
  return slots.map(({ sum, count }) => ({ query: sum.map((number) => number / Math.max(1, count)), count }));
}

// How the query of a position combines the slots: coefficients, divided by the divisor of the slots' sums.
function weightsOfSlots(operator, grid, valid, summary, position) {
  const combine = (query) => COEFFICIENTS[operator.coefficients](query, summary, operator)
    .map((number, slot) => number / PER[operator.per](query, summary, slot));
  if (operator.queries_from === "all") return combine(queryAt(grid, valid, position));
  const means = (summary.means ??= axisQueries(operator, grid, valid).map(({ query, count }) => ({ weights: combine(query), count })));
  const [row, column] = axisSlots(grid.size, position);
  const total = means.reduce((sum, { count }) => sum + count, 0);
  return means[row].weights.map((number, slot) => {
    const sum = number + means[column].weights[slot];
    if (!operator.normalized || !total) return sum;
    return sum - means.reduce((mean, { weights, count }) => mean + weights[slot] * count, 0) / total;
  });
}

// The response of a position: slots' sums times the weights of its query.
function respond(operator, grid, valid, summary, position) {
  const weights = weightsOfSlots(operator, grid, valid, summary, position);
  return grid.values.map((_, channel) => weights.reduce((sum, weight, slot) => sum + weight * summary.values[slot][channel], 0));
}

// A row of the implied attention matrix: the weight of each position for the query of one.
function attentionRow(operator, grid, valid, summary, position) {
  return spread(operator, grid, valid, summary, weightsOfSlots(operator, grid, valid, summary, position));
}

// The weight of each position for given weights of the slots; of one slot alone this is its basis.
function spread(operator, grid, valid, summary, weights) {
  const row = new Float64Array(valid.length);
  if (operator.basis) {
    for (let position = 0; position < row.length; position++) {
      if (!valid[position]) continue;
      const basis = BASIS[operator.basis](at(grid.keys, position), operator);
      row[position] = weights.reduce((sum, weight, slot) =>
        sum + weight * (summary.peak ? Math.exp(basis[slot] - summary.peak[slot]) : basis[slot]), 0);
    }
  } else if (operator.keys_from === "all") {
    summary.members.forEach((position, slot) => (row[position] = weights[slot]));
  } else {
    const counts = new Float64Array(weights.length);
    for (let position = 0; position < row.length; position++)
      if (valid[position]) for (const slot of slotsOf(operator, grid.size, position)) counts[slot] += 1;
    // The weights of axes are of sums; the pooled value of a window is spread evenly over its positions.
    const share = (slot) => (operator.keys_from === "axes" ? weights[slot] : weights[slot] / counts[slot]);
    for (let position = 0; position < row.length; position++)
      if (valid[position]) row[position] = slotsOf(operator, grid.size, position).reduce((sum, slot) => sum + share(slot), 0);
  }
  return row;
}

// The basis of one slot, divided by the divisor of its sum: maps.basis_masks.
function basisMask(operator, grid, valid, summary, slot) {
  const per = PER[operator.per](at(grid.queries, 0), summary, slot);
  return spread(operator, grid, valid, summary, summary.weights.map((_, other) => Number(other === slot) / per));
}
