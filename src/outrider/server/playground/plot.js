// A line over the last tokens of the chat, in SVG. One unit is one pixel.

const NAMESPACE = "http://www.w3.org/2000/svg";
const PAD = 3;

function svg(tag, attributes) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// The smallest of 1, 2, 5, 10, 20 ... that holds the value.
export function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

export class Plot {
  // `base`: a value worth a line of its own.
  constructor(element, base = null) {
    this.element = element;
    this.base = base;
    this.line = svg("path", { class: "line" });
    this.dot = svg("circle", { class: "dot", r: 2.5 });
    this.rule = svg("line", { class: "rule" });
    this.marks = svg("g", { class: "marks" });
    element.append(this.rule, this.marks, this.line, this.dot);
    this.dot.setAttribute("visibility", "hidden");
  }

  // points: [{x, y, begins}], y null where it is not known; `begins` marks the start of an answer.
  draw(points, top) {
    const { width, height } = this.element.getBoundingClientRect();
    if (!width) return;
    this.element.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const first = points[0]?.x ?? 0;
    const span = Math.max((points.at(-1)?.x ?? 0) - first, 60); // a short answer does not fill the plot
    const across = (x) => (PAD + ((x - first) / span) * (width - 2 * PAD)).toFixed(1);
    const up = (y) => (height - PAD - (Math.min(y, top) / top) * (height - 2 * PAD)).toFixed(1);
    let path = "";
    let pen = false;
    let last = null;
    for (const point of points) {
      if (point.begins || point.y === null) pen = false;
      if (point.y === null) continue;
      path += `${pen ? "L" : "M"}${across(point.x)} ${up(point.y)}`;
      pen = true;
      last = point;
    }
    this.line.setAttribute("d", path);
    this.dot.setAttribute("visibility", last ? "visible" : "hidden");
    if (last) {
      this.dot.setAttribute("cx", across(last.x));
      this.dot.setAttribute("cy", up(last.y));
    }
    this.drawMarks(points.filter((point) => point.begins && point.x > first).map((point) => across(point.x)), height);
    const rule = this.base === null ? height - 1 : up(this.base);
    for (const [name, value] of Object.entries({ x1: 0, x2: width, y1: rule, y2: rule })) this.rule.setAttribute(name, value);
  }

  drawMarks(places, height) {
    this.marks.replaceChildren(...places.map((x) => svg("line", { x1: x, x2: x, y1: 0, y2: height })));
  }
}
