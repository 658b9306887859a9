// What every part of the page uses: the data, small helpers to build elements (text is never read as HTML).
const data = JSON.parse(document.getElementById("data").textContent);

function make(tag, settings = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const className = (row) => data.classes[data.samples[row][0]];
const sampleName = (row) => data.samples[row][1];

// The picture of a row, or in words, where there is none, its text or its class.
function picture(row) {
  const text = data.pictures && data.pictures.data[row];
  if (!text) return make("span", { class: "words" }, make("span", {}, data.samples[row] ? (data.texts ? sampleName(row) : className(row)) : ""));
  return make("img", { src: `data:${data.pictures.mime};base64,${text}`, alt: "", decoding: "async" });
}

// A framed picture; `right` is true, false, or null for the query itself.
function tile(row, right = null, note = null) {
  const kind = right === null ? "" : right ? " right" : " wrong";
  const word = right === null ? "query" : right ? "right" : "wrong";
  return make("span", { class: `tile${kind}`, title: `${word}: ${className(row)}, ${sampleName(row)}` },
    make("span", { class: "frame" }, picture(row)),
    right === null ? null : make("span", { class: "badge", "aria-hidden": "true" }, right ? "✓" : "✕"),
    note === null ? null : make("span", { class: "score" }, note));
}

// A row of buttons of which one is pressed.
function choice(label, options, chosen, change) {
  const group = make("div", { class: "switch", role: "group", "aria-label": label });
  for (const [value, text] of options) {
    group.append(make("button", { type: "button", "data-value": value, "aria-pressed": String(value === chosen),
      onclick: () => { press(group, value); change(value); } }, text));
  }
  return group;
}

function press(group, value) {
  for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.value === value));
}

if (data.texts) document.body.classList.add("texts");
if (!data.pictures) document.body.classList.add("wordy");
else if (data.pictures.ink) document.body.classList.add("ink");
for (const place of document.querySelectorAll(".pic")) {
  const text = data.pictures && data.pictures.data[place.dataset.row];
  if (text) place.append(picture(place.dataset.row));
}

// Curves: a cursor that reads the values off.
for (const figure of document.querySelectorAll(".curve[data-curve]")) {
  const curve = data.curves[figure.dataset.curve];
  const svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const outputs = figure.querySelectorAll("output");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const along = ((event.clientX - box.left) / box.width - curve.left) / (curve.right - curve.left);
    const step = curve.low + Math.min(1, Math.max(0, along)) * (curve.high - curve.low);
    let at = step;
    curve.series.forEach((points, i) => {
      const nearest = points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
      outputs[i].textContent = `${nearest[1]} at ${nearest[0]}`;
      if (i === 0) at = nearest[0];
    });
    const x = (curve.left + ((at - curve.low) / (curve.high - curve.low || 1)) * (curve.right - curve.left)) * svg.viewBox.baseVal.width;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    outputs.forEach((output) => { output.textContent = output.dataset.last; });
  });
}
