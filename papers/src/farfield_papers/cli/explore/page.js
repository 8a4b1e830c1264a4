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
  size: DATA.size, keys: ARRAYS[panel.keys], queries: ARRAYS[panel.queries], values: colours,
}));
let GRIDS = null, valid = null, summaries = null;
let rows = [], bases = []; // what is drawn: the row of each panel, and the basis of each slot of the chosen one

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
  $("panels").style.setProperty("--x", `${x / canvas.width * 100}%`);
  $("panels").style.setProperty("--y", `${y / canvas.height * 100}%`);
  $("position").textContent = `row ${Math.floor(state.position / WIDTH)}, column ${state.position % WIDTH} of ${HEIGHT} × ${WIDTH}`;
}

// A number with three digits and a prefix of 1,000: 1610000 is "1.61 M".
function amount(number) {
  const power = Math.min(5, Math.max(0, Math.floor(Math.log10(Math.max(1, number)) / 3)));
  return `${Number((number / 1000 ** power).toPrecision(3))}\u00a0${["", "k", "M", "G", "T", "P"][power]}`;
}

function update() {
  drawPhotograph();
  rows = DATA.panels.map((panel, index) => attentionRow(panel.operator, GRIDS[index], valid, summaries[index], state.position));
  DATA.panels.forEach((panel, index) => {
    const button = $(`panel${index}`);
    draw(button.querySelector("canvas"), rows[index]);
    showResponse(button, panel.operator, GRIDS[index], summaries[index]);
    button.querySelector(".even").textContent = evenWeight(rows[index]);
    const [macs, bytes] = [panel.macs[state.step], panel.bytes[state.step]];
    button.querySelector(".numbers").textContent = `${amount(macs)} MACs, ${amount(bytes)}B`;
    button.querySelector(".cost i").style.width = `${100 * Math.log(macs / DATA.least) / Math.log(DATA.most / DATA.least)}%`;
    button.setAttribute("aria-pressed", index === state.chosen);
  });
  $("grid").textContent = `${DATA.sizes[state.step]} × ${DATA.sizes[state.step]}`;
  detail();
}

// What to say of a row in one colour: the one weight that all valid positions have, up to rounding.
function evenWeight(row) {
  const weights = row.filter((_, position) => valid[position]);
  const [least, most] = [Math.min(...weights), Math.max(...weights)];
  return most - least > 1e-6 * Math.max(Math.abs(least), Math.abs(most)) ? "" : `every position has the weight ${Number(most.toPrecision(3))}`;
}

// The response as a colour, and how much it differs where the grid comes in tiles or in another order.
function showResponse(button, operator, grid, summary) {
  const response = respond(operator, grid, valid, summary, state.position);
  let text = "";
  if (state.tiles > 1 || state.shuffled) {
    const again = respond(operator, grid, valid, summaryOfTiles(operator, grid), state.position);
    const most = Math.max(...response.map(Math.abs)) || 1;
    const difference = Math.max(...response.map((number, channel) => Math.abs(number - again[channel]) / most));
    text = `differs by ${difference && difference.toExponential(0)}`;
  }
  button.querySelector(".exact").textContent = text;
  button.querySelector(".swatch").style.background = `rgb(${response.map((number) => Math.round(255 * Math.min(1, Math.max(0, number)))).join()})`;
}

// The chosen panel: its code, the basis of its slots, and the weight that the query gives each.
function detail() {
  const panel = DATA.panels[state.chosen], grid = GRIDS[state.chosen], summary = summaries[state.chosen];
  const box = $("detail");
  if (box.dataset.key !== `${state.chosen} ${state.masked}`) {
    box.dataset.key = `${state.chosen} ${state.masked}`;
    box.innerHTML = `<h2>${panel.name}</h2><p>${panel.text}</p><p>${panel.slots}</p>
      <div class="code"><pre id="code"></pre><button type="button" id="copy">copy</button></div><p class="faint">${DATA.note}</p><div class="slots"></div>`;
    $("copy").onclick = copy;
    bases = panel.operator.basis ? summary.weights.map((_, slot) => basisMask(panel.operator, grid, valid, summary, slot)) : [];
    bases.forEach((basis, slot) => {
      const button = document.createElement("button");
      button.type = "button";
      button.innerHTML = `<canvas role="img" aria-label="basis of slot ${slot}"></canvas><span></span>`;
      button.onclick = () => { state.slot = state.slot === slot ? null : slot; update(); };
      box.querySelector(".slots").append(button);
      draw(button.querySelector("canvas"), basis);
    });
  }
  const weights = weightsOfSlots(panel.operator, grid, valid, summary, state.position);
  box.querySelectorAll(".slots button").forEach((button, slot) => {
    button.querySelector("span").textContent = `slot ${slot}\n${weights[slot].toPrecision(3)}`;
    button.setAttribute("aria-pressed", slot === state.slot);
  });
  $("code").innerHTML = code(panel);
  if (state.slot !== null)
    draw($(`panel${state.chosen}`).querySelector("canvas"), spread(panel.operator, grid, valid, summary, weights.map((weight, slot) => (slot === state.slot ? weight : 0))));
}

// The line of Python that computes what is shown: the row of the chosen panel, or the basis of its chosen slot.
function code(panel) {
  const [row, column] = indices(DATA.size, state.position);
  const mask = state.masked ? `, mask=torch.arange(${WIDTH}).expand(1, ${HEIGHT}, ${WIDTH}) &gt;= ${WIDTH} / 3` : "";
  if (state.slot === null) return `maps.attention_row(${panel.arguments}, (${row}, ${column})${mask})[0, ${panel.head}]`;
  return `maps.basis_masks(${panel.arguments}${mask})[0, ${panel.head}, ${state.slot}]`;
}

// Without a clipboard, as on pages without a certificate, the line is selected.
function copy() {
  const line = $("code"), text = line.textContent;
  const done = navigator.clipboard ? navigator.clipboard.writeText(text) : Promise.reject(new Error("no clipboard"));
  done.then(() => ($("copy").textContent = "copied"), () => getSelection().selectAllChildren(line));
}

// ---- events --------------------------------------------------------------------------------------------------------
let waiting = false;
function soon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; update(); });
}

// A finger on a panel scrolls the page; on the photograph it moves the query.
function point(event) {
  if (event.pointerType === "touch" && event.currentTarget !== $("photograph")) return;
  const box = event.currentTarget.getBoundingClientRect(), clamp = (number, most) => Math.min(most - 1, Math.max(0, Math.floor(number)));
  state.position = clamp((event.clientY - box.top) / box.height * HEIGHT, HEIGHT) * WIDTH + clamp((event.clientX - box.left) / box.width * WIDTH, WIDTH);
  soon();
}

function choose(index) {
  [state.chosen, state.slot] = [index, null];
  update();
  $("detail").scrollIntoView({ block: "nearest" });
}

function set(name, value) {
  state[name] = value;
  [$("mask").checked, $("tiles").value, $("shuffle").checked] = [state.masked, String(state.tiles), state.shuffled];
  if (name === "masked") revalue();
  soon();
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input[type=range]")) return;
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
    button.innerHTML = `<span class="map"><canvas role="img" aria-label="weights of ${panel.name}"></canvas><i></i></span>
      <b>${panel.name.replaceAll("_", "_<wbr>")}</b><span class="text faint">${panel.text}</span><span class="even faint"></span><span class="cost"><i></i></span><span class="numbers"></span>
      <span class="response"><span class="swatch"></span> response, in colours</span><span class="exact faint"></span>`;
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
  for (const part of document.querySelectorAll("details")) part.open = !matchMedia("(max-width: 900px)").matches;
  revalue();
  update();
}

const photograph = new Image();
photograph.onload = start;
photograph.src = DATA.photograph;
