// The page: draws the rows of all operators for the query under the pointer.
"use strict";

const $ = (id) => document.getElementById(id);
const [HEIGHT, WIDTH] = DATA.size;
const POSITIONS = HEIGHT * WIDTH;
const state = { position: DATA.position, chosen: 0, slot: null, masked: false, tiles: 1, shuffled: false, step: DATA.sizes.indexOf(DATA.shown) };

// ---- data ----------------------------------------------------------------------------------------------------------
function decode(array) {
  const bytes = Uint8Array.from(atob(array.data), (letter) => letter.charCodeAt(0));
  const whole = new Int16Array(bytes.buffer);
  return array.scales.map((scale, channel) =>
    Float64Array.from(whole.subarray(channel * POSITIONS, (channel + 1) * POSITIONS), (number) => number * scale));
}

const ARRAYS = DATA.arrays.map(decode);
let colours = null; // the photograph at the size of the grid: one row of numbers from 0 to 1 per colour
const grids = () => DATA.panels.map((panel) => ({
  size: DATA.size, keys: ARRAYS[panel.keys], queries: ARRAYS[panel.queries], values: colours, vector: panel.vector,
}));
let GRIDS = null, valid = null, summaries = null;

function revalue() {
  valid = Uint8Array.from({ length: POSITIONS }, (_, position) => (state.masked && position % WIDTH < WIDTH / 3 ? 0 : 1));
  const all = [...Array(POSITIONS).keys()];
  summaries = DATA.panels.map((panel, index) => summarize(panel.operator, GRIDS[index], valid, all));
}

// The summary of the same positions, from tiles that begin at even rows and columns, in the chosen order.
function summaryOfTiles(operator, grid) {
  const edge = (length) => 2 * Math.ceil(length / (2 * state.tiles));
  const tiles = Array.from({ length: state.tiles ** 2 }, () => []);
  for (let position = 0; position < POSITIONS; position++) {
    const row = Math.floor(Math.floor(position / WIDTH) / edge(HEIGHT)), column = Math.floor((position % WIDTH) / edge(WIDTH));
    tiles[row * state.tiles + column].push(position);
  }
  if (state.shuffled) [tiles, ...tiles].forEach(shuffle);
  return tiles.filter((tile) => tile.length).map((tile) => summarize(operator, grid, valid, tile)).reduce((a, b) => merge(operator, a, b));
}

function shuffle(list) {
  for (let last = list.length - 1; last > 0; last--) {
    const other = Math.floor(Math.random() * (last + 1));
    [list[last], list[other]] = [list[other], list[last]];
  }
}

// ---- drawing -------------------------------------------------------------------------------------------------------
const ramp = (stops) => (share) => {
  const place = share * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(place));
  return stops[low].map((number, channel) => number + (place - low) * (stops[low + 1][channel] - number));
};
const WARM = ramp([[22, 24, 29], [122, 29, 109], [232, 96, 44], [252, 243, 165]]);
const COLD = ramp([[22, 24, 29], [18, 53, 91], [111, 177, 255]]);

function draw(canvas, row) {
  canvas.width = WIDTH;
  canvas.height = HEIGHT;
  const largest = row.reduce((most, weight) => Math.max(most, Math.abs(weight)), 0);
  const most = largest * POSITIONS < 1e-3 ? 1 : largest; // weights that are 0 but for the rounding of the page's numbers
  const image = new ImageData(WIDTH, HEIGHT);
  for (let position = 0; position < POSITIONS; position++) {
    const share = Math.sqrt(Math.abs(row[position]) / most), colour = (row[position] < 0 ? COLD : WARM)(share);
    const grey = 255 * (0.3 * colours[0][position] + 0.59 * colours[1][position] + 0.11 * colours[2][position]) * (valid[position] ? 0.28 : 0.08);
    colour.forEach((number, channel) => (image.data[4 * position + channel] = grey * (1 - share) + number * share));
    image.data[4 * position + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function drawPhotograph() {
  const canvas = $("photograph"), context = canvas.getContext("2d");
  context.drawImage(photograph, 0, 0, canvas.width, canvas.height);
  if (state.masked) {
    context.fillStyle = "#000b";
    context.fillRect(0, 0, (Math.ceil(WIDTH / 3) / WIDTH) * canvas.width, canvas.height);
  }
  const x = ((state.position % WIDTH) + 0.5) / WIDTH * canvas.width, y = (Math.floor(state.position / WIDTH) + 0.5) / HEIGHT * canvas.height;
  for (const [width, colour] of [[5, "#000"], [2, "#fff"]]) {
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.beginPath();
    context.arc(x, y, canvas.width / 45, 0, 2 * Math.PI);
    context.stroke();
  }
  $("position").textContent = `row ${Math.floor(state.position / WIDTH)}, column ${state.position % WIDTH} of ${HEIGHT} × ${WIDTH}`;
}

// A number with three digits and a prefix of 1,000: 1610000 is "1.61 M".
function amount(number) {
  const power = Math.min(5, Math.max(0, Math.floor(Math.log10(Math.max(1, number)) / 3)));
  return `${Number((number / 1000 ** power).toPrecision(3))} ${["", "k", "M", "G", "T", "P"][power]}`;
}

function update() {
  drawPhotograph();
  DATA.panels.forEach((panel, index) => {
    const [button, grid] = [$(`panel${index}`), GRIDS[index]];
    const row = attentionRow(panel.operator, grid, valid, summaries[index], state.position);
    draw(button.querySelector("canvas"), row);
    const response = respond(panel.operator, grid, valid, summaries[index], state.position);
    let text = "";
    if (state.tiles > 1 || state.shuffled) {
      const again = respond(panel.operator, grid, valid, summaryOfTiles(panel.operator, grid), state.position);
      const most = Math.max(...response.map(Math.abs)) || 1;
      text = `differs by ${Math.max(...response.map((number, channel) => Math.abs(number - again[channel]) / most)).toExponential(0)}`;
    }
    button.querySelector(".exact").textContent = text;
    button.querySelector(".swatch").style.background = `rgb(${response.map((number) => Math.round(255 * Math.min(1, Math.max(0, number)))).join()})`;
    const [macs, bytes] = [panel.macs[state.step], panel.bytes[state.step]];
    button.querySelector(".numbers").textContent = `${amount(macs)} MACs, ${amount(bytes)}B`;
    button.querySelector(".cost i").style.width = `${100 * Math.log(macs / DATA.least) / Math.log(DATA.most / DATA.least)}%`;
    button.setAttribute("aria-pressed", index === state.chosen);
  });
  $("grid").textContent = `${DATA.sizes[state.step]} × ${DATA.sizes[state.step]}`;
  detail();
}

function detail() {
  const panel = DATA.panels[state.chosen], grid = GRIDS[state.chosen], summary = summaries[state.chosen];
  const box = $("detail");
  if (box.dataset.key !== `${state.chosen} ${state.masked}`) {
    box.dataset.key = `${state.chosen} ${state.masked}`;
    box.innerHTML = `<h2>${panel.name}</h2><p>${panel.text}</p><pre>${panel.code}</pre><button type="button" id="copy">copy</button>
      <p>${panel.slots}</p><div class="slots"></div>`;
    $("copy").onclick = () => navigator.clipboard.writeText(panel.code).then(() => ($("copy").textContent = "copied"));
    if (panel.operator.basis) summary.weights.forEach((_, slot) => {
      const button = document.createElement("button");
      button.type = "button";
      button.innerHTML = `<canvas aria-label="basis of slot ${slot}"></canvas><span></span>`;
      button.onclick = () => { state.slot = state.slot === slot ? null : slot; update(); };
      box.querySelector(".slots").append(button);
      draw(button.querySelector("canvas"), spread(panel.operator, grid, valid, summary, summary.weights.map((_, other) => Number(other === slot))));
    });
  }
  const weights = weightsOfSlots(panel.operator, grid, valid, summary, state.position);
  box.querySelectorAll(".slots button").forEach((button, slot) => {
    button.querySelector("span").textContent = `slot ${slot}: ${weights[slot].toPrecision(3)}`;
    button.setAttribute("aria-pressed", slot === state.slot);
  });
  if (state.slot !== null && panel.operator.basis)
    draw($(`panel${state.chosen}`).querySelector("canvas"), spread(panel.operator, grid, valid, summary, weights.map((weight, slot) => (slot === state.slot ? weight : 0))));
}

// ---- events --------------------------------------------------------------------------------------------------------
let waiting = false;
function soon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; update(); });
}

function point(event) {
  const box = event.currentTarget.getBoundingClientRect(), clamp = (number, most) => Math.min(most - 1, Math.max(0, Math.floor(number)));
  state.position = clamp((event.clientY - box.top) / box.height * HEIGHT, HEIGHT) * WIDTH + clamp((event.clientX - box.left) / box.width * WIDTH, WIDTH);
  soon();
}

function choose(index) {
  [state.chosen, state.slot] = [index, null];
  soon();
}

function set(name, value) {
  state[name] = value;
  [$("mask").checked, $("tiles").value, $("shuffle").checked] = [state.masked, String(state.tiles), state.shuffled];
  if (name === "masked") revalue();
  soon();
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT", "INPUT"].includes(event.target.tagName)) return;
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (moves[event.key]) {
    const row = Math.floor(state.position / WIDTH) + moves[event.key][0], column = state.position % WIDTH + moves[event.key][1];
    if (row >= 0 && row < HEIGHT && column >= 0 && column < WIDTH) state.position = row * WIDTH + column;
    event.preventDefault();
    soon();
  } else if (event.key === "m") set("masked", !state.masked);
  else if (event.key === "t") set("tiles", { 1: 2, 2: 4, 4: 1 }[state.tiles]);
  else if (event.key === "s") set("shuffled", !state.shuffled);
  else if (event.key >= "1" && event.key <= "9" && DATA.panels[event.key - 1]) choose(event.key - 1);
}

function start() {
  const small = document.createElement("canvas");
  [small.width, small.height] = [WIDTH, HEIGHT];
  const context = small.getContext("2d");
  context.drawImage(photograph, 0, 0, WIDTH, HEIGHT);
  const pixels = context.getImageData(0, 0, WIDTH, HEIGHT).data;
  colours = [0, 1, 2].map((channel) => Float64Array.from({ length: POSITIONS }, (_, position) => pixels[4 * position + channel] / 255));
  GRIDS = grids();
  [$("photograph").width, $("photograph").height] = [photograph.naturalWidth, photograph.naturalHeight];
  DATA.panels.forEach((panel, index) => {
    const button = document.createElement("button");
    [button.id, button.type, button.className] = [`panel${index}`, "button", "panel"];
    button.innerHTML = `<canvas aria-label="weights of ${panel.name}"></canvas><b>${panel.name}</b><span class="faint">${panel.text}</span>
      <span class="cost"><i></i></span><span class="numbers"></span><span class="response"><span class="swatch"></span> its response, in colours</span>
      <span class="exact faint"></span>`;
    button.onclick = () => choose(index);
    button.querySelector("canvas").addEventListener("pointermove", point);
    $("panels").append(button);
  });
  for (const kind of ["pointermove", "pointerdown"]) $("photograph").addEventListener(kind, point);
  document.addEventListener("keydown", press);
  $("mask").onchange = (event) => set("masked", event.target.checked);
  $("tiles").onchange = (event) => set("tiles", Number(event.target.value));
  $("shuffle").onchange = (event) => set("shuffled", event.target.checked);
  [$("size").max, $("size").value] = [DATA.sizes.length - 1, state.step];
  $("size").oninput = (event) => set("step", Number(event.target.value));
  $("theme").onclick = () => {
    const dark = document.documentElement.classList.contains("dark") ||
      (!document.documentElement.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.className = dark ? "light" : "dark";
  };
  revalue();
  update();
}

const photograph = new Image();
photograph.onload = start;
photograph.src = DATA.photograph;
