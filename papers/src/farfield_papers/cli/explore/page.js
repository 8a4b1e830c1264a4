// The page: shows the rows of all operators for the query next to the pointer. All numbers and maps were computed before.
"use strict";

const $ = (id) => document.getElementById(id);
const [HEIGHT, WIDTH] = DATA.size;
const middle = (list) => Math.floor(list.length / 2);
// The query is an index of DATA.rows and one of DATA.columns; `slot` is the basis that the chosen panel shows.
const state = { row: middle(DATA.rows), column: middle(DATA.columns), chosen: 0, slot: null, step: DATA.sizes.indexOf(DATA.shown) };
const position = () => [DATA.rows[state.row], DATA.columns[state.column]];
const query = () => state.row * DATA.columns.length + state.column;
const dark = document.createElement("canvas");
let photograph = null;
let images = []; // DATA.pictures, in each the rows of a panel, or the basis of its slots

// ---- drawing -------------------------------------------------------------------------------------------------------
// One of the maps that stand below each other in an image, over the dark photograph.
function draw(canvas, image, index) {
  [canvas.width, canvas.height] = [WIDTH, HEIGHT];
  const context = canvas.getContext("2d");
  context.drawImage(dark, 0, 0);
  context.drawImage(image, 0, index * HEIGHT, WIDTH, HEIGHT, 0, 0, WIDTH, HEIGHT);
}

function drawPhotograph() {
  const canvas = $("photograph"), context = canvas.getContext("2d");
  context.drawImage(photograph, 0, 0, canvas.width, canvas.height);
  const place = (row, column) => [(column + 0.5) / WIDTH * canvas.width, (row + 0.5) / HEIGHT * canvas.height];
  const circle = (at, radius, width, colour) => {
    [context.lineWidth, context.strokeStyle] = [width, colour];
    context.beginPath();
    context.arc(...at, radius, 0, 2 * Math.PI);
    context.stroke();
  };
  for (const row of DATA.rows) for (const column of DATA.columns) circle(place(row, column), 1, 2, "#fff9");
  const [x, y] = place(...position());
  circle([x, y], canvas.width / 45, 5, "#000");
  circle([x, y], canvas.width / 45, 2, "#fff");
  $("panels").style.setProperty("--x", `${x / canvas.width * 100}%`);
  $("panels").style.setProperty("--y", `${y / canvas.height * 100}%`);
  $("position").textContent = `row ${position()[0]}, column ${position()[1]} of ${HEIGHT} × ${WIDTH}`;
}

// A number with three digits and a prefix of 1,000: 1610000 is "1.61 M".
function amount(number) {
  const power = Math.min(5, Math.max(0, Math.floor(Math.log10(Math.max(1, number)) / 3)));
  return `${Number((number / 1000 ** power).toPrecision(3))}\u00a0${["", "k", "M", "G", "T", "P"][power]}`;
}

function update() {
  drawPhotograph();
  DATA.panels.forEach((panel, index) => {
    const button = $(`panel${index}`), basis = index === state.chosen && state.slot !== null;
    draw(button.querySelector("canvas"), images[basis ? panel.basis : panel.rows], basis ? state.slot : query());
    button.querySelector(".weights").textContent = basis ? `basis of slot ${state.slot}` : `weights ${panel.weights[query()]}`;
    const [macs, bytes] = [panel.macs[state.step], panel.bytes[state.step]];
    button.querySelector(".numbers").textContent = `${amount(macs)} MACs, ${amount(bytes)}B`;
    button.querySelector(".cost i").style.width = `${100 * Math.log(macs / DATA.least) / Math.log(DATA.most / DATA.least)}%`;
    button.setAttribute("aria-pressed", index === state.chosen);
  });
  $("grid").textContent = `${DATA.sizes[state.step]} × ${DATA.sizes[state.step]}`;
  const panel = DATA.panels[state.chosen];
  $("code").innerHTML = state.slot === null
    ? `maps.attention_row(${panel.arguments}, (${position().join(", ")}))[0, ${panel.head}]`
    : `maps.basis_masks(${panel.arguments})[0, ${panel.head}, ${state.slot}]`;
  document.querySelectorAll(".slots button").forEach((button, slot) => button.setAttribute("aria-pressed", slot === state.slot));
}

// The chosen panel: the line of Python that computes what it shows, and the basis of its slots.
function choose(index) {
  [state.chosen, state.slot] = [index, null];
  const panel = DATA.panels[index], box = $("detail");
  box.innerHTML = `<h2>${panel.name}</h2><p>${panel.text}</p><p>${panel.slots}</p>
    <div class="code"><pre id="code"></pre><button type="button" id="copy">copy</button></div><p class="faint">${DATA.note}</p><div class="slots"></div>`;
  $("copy").onclick = copy;
  for (let slot = 0; slot < panel.bases; slot++) {
    const button = document.createElement("button");
    button.type = "button";
    button.innerHTML = `<canvas role="img" aria-label="basis of slot ${slot}"></canvas><span>slot ${slot}</span>`;
    button.onclick = () => { state.slot = state.slot === slot ? null : slot; update(); };
    box.querySelector(".slots").append(button);
    draw(button.querySelector("canvas"), images[panel.basis], slot);
  }
  update();
}

// Without a clipboard, as on pages without a certificate, the line is selected.
function copy() {
  const line = $("code"), text = line.textContent;
  const done = navigator.clipboard ? navigator.clipboard.writeText(text) : Promise.reject(new Error("no clipboard"));
  done.then(() => ($("copy").textContent = "copied"), () => getSelection().selectAllChildren(line));
}

// ---- events --------------------------------------------------------------------------------------------------------
const nearest = (list, place) => list.reduce((best, each, index) => (Math.abs(each + 0.5 - place) < Math.abs(list[best] + 0.5 - place) ? index : best), 0);

// A finger on a panel scrolls the page; on the photograph it moves the query.
function point(event) {
  if (event.pointerType === "touch" && event.currentTarget !== $("photograph")) return;
  const box = event.currentTarget.getBoundingClientRect();
  state.row = nearest(DATA.rows, (event.clientY - box.top) / box.height * HEIGHT);
  state.column = nearest(DATA.columns, (event.clientX - box.left) / box.width * WIDTH);
  update();
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input[type=range]")) return;
  const moves = { ArrowUp: ["row", -1], ArrowDown: ["row", 1], ArrowLeft: ["column", -1], ArrowRight: ["column", 1] };
  if (moves[event.key]) {
    const [axis, step] = moves[event.key], last = { row: DATA.rows, column: DATA.columns }[axis].length - 1;
    state[axis] = Math.min(last, Math.max(0, state[axis] + step));
    event.preventDefault();
    update();
  } else if (event.key >= "1" && event.key <= "9" && DATA.panels[event.key - 1]) choose(event.key - 1);
}

async function load(source) {
  const image = new Image();
  image.src = source;
  await image.decode();
  return image;
}

async function start() {
  photograph = await load(DATA.photograph);
  [$("photograph").width, $("photograph").height] = [photograph.naturalWidth, photograph.naturalHeight];
  [dark.width, dark.height] = [WIDTH, HEIGHT];
  const context = dark.getContext("2d");
  context.filter = "grayscale(1) brightness(.28)";
  context.drawImage(photograph, 0, 0, WIDTH, HEIGHT);
  images = await Promise.all(DATA.pictures.map(load));
  DATA.panels.forEach((panel, index) => {
    const button = document.createElement("button");
    [button.id, button.type, button.className] = [`panel${index}`, "button", "panel"];
    button.innerHTML = `<span class="map"><canvas role="img" aria-label="weights of ${panel.name}"></canvas><i></i></span>
      <b>${panel.name.replaceAll("_", "_<wbr>")}</b><span class="text faint">${panel.text}</span><span class="weights faint"></span><span class="cost"><i></i></span><span class="numbers"></span>`;
    button.onclick = () => { choose(index); $("detail").scrollIntoView({ block: "nearest" }); };
    button.querySelector("canvas").addEventListener("pointermove", point);
    $("panels").append(button);
  });
  for (const kind of ["pointermove", "pointerdown"]) $("photograph").addEventListener(kind, point);
  document.addEventListener("keydown", press);
  [$("size").max, $("size").value] = [DATA.sizes.length - 1, state.step];
  $("size").oninput = (event) => { state.step = Number(event.target.value); update(); };
  $("theme").onclick = () => {
    const dark = document.documentElement.classList.contains("dark") ||
      (!document.documentElement.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.className = dark ? "light" : "dark";
  };
  for (const part of document.querySelectorAll("details")) part.open = !matchMedia("(max-width: 900px)").matches;
  choose(0);
  document.body.dataset.drawn = "";
}

start();
