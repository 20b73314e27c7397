// Draws the curves and phase times from the data in the page. Text is inserted as text only, never as HTML.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 440, HEIGHT = 210, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 30;
  let axis = "s";

  const make = (name, attributes = {}, parent = null, text = null) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    if (parent) parent.appendChild(element);
    return element;
  };
  const html = (name, className, parent, text = "") => {
    const element = document.createElement(name);
    element.className = className;
    element.textContent = text;
    parent.appendChild(element);
    return element;
  };
  const shown = (value) => {
    if (value === null || value === undefined) return "not finite";
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  };

  // Round numbers between two limits, about `count` of them.
  const ticks = (low, high, count) => {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
    const found = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
    return found;
  };

  const limits = (curves) => {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const one of curves) {
      const at = data.axes[one.x][axis];
      for (let i = 0; i < at.length; i++) {
        if (at[i] === null) continue;
        x0 = Math.min(x0, at[i]);
        x1 = Math.max(x1, at[i]);
        for (const value of [one.y[i], one.lo ? one.lo[i] : null, one.hi ? one.hi[i] : null]) {
          if (value === null) continue;
          y0 = Math.min(y0, value);
          y1 = Math.max(y1, value);
        }
      }
    }
    if (!(x0 <= x1)) [x0, x1] = [0, 1];
    if (!(y0 <= y1)) [y0, y1] = [0, 1];
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    if (y0 === y1) {
      const room = Math.abs(y0) * 0.1 || 1;
      [y0, y1] = [y0 - room, y1 + room];
    } else if (y0 > 0 && y0 < 0.35 * y1) y0 = 0;
    return { x0, x1, y0, y1 };
  };

  const frame = (svg, box, width) => {
    const toX = (value) => LEFT + ((value - box.x0) / (box.x1 - box.x0)) * (width - LEFT - RIGHT);
    const toY = (value) => HEIGHT - BOTTOM - ((value - box.y0) / (box.y1 - box.y0)) * (HEIGHT - TOP - BOTTOM);
    for (const value of ticks(box.y0, box.y1, 5)) {
      make("line", { x1: LEFT, x2: width - RIGHT, y1: toY(value), y2: toY(value), class: "tick" }, svg);
      make("text", { x: LEFT - 6, y: toY(value) + 4, "text-anchor": "end" }, svg, shown(value));
    }
    const marks = ticks(box.x0, box.x1, Math.max(4, Math.round(width / 110))).filter((value) => axis === "t" || Number.isInteger(value));
    for (const value of marks) make("text", { x: toX(value), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, svg, shown(value));
    make("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, svg, axis === "s" ? "training step" : "minutes");
    return { toX, toY };
  };

  const band = (one, at, { toX, toY }) => {
    const pieces = [];
    let piece = [];
    for (let i = 0; i < at.length; i++) {
      if (at[i] !== null && one.lo[i] !== null) piece.push(i);
      else piece = [];
      if (piece.length === 1) pieces.push(piece);
    }
    return pieces.map((list) => {
      const above = list.map((i) => `${toX(at[i]).toFixed(1)},${toY(one.hi[i]).toFixed(1)}`);
      const below = list.map((i) => `${toX(at[i]).toFixed(1)},${toY(one.lo[i]).toFixed(1)}`).reverse();
      return `M${above.concat(below).join("L")}Z`;
    }).join("");
  };
  const path = (one, at, { toX, toY }) => {
    let text = "", pen = "M";
    for (let i = 0; i < at.length; i++) {
      if (one.y[i] === null || at[i] === null) pen = "M";
      else {
        text += `${pen}${toX(at[i]).toFixed(1)},${toY(one.y[i]).toFixed(1)}`;
        pen = "L";
      }
    }
    return text;
  };

  const nearest = (at, value) => {
    let low = 0, high = at.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low > 0 && value - at[low - 1] < at[low] - value ? low - 1 : low;
  };
  const place = (index, i) => {
    const { s, t, w } = data.axes[index];
    const steps = w > 1 ? `steps ${s[i]} to ${s[i] + w - 1}` : `step ${s[i]}`;
    return t[i] === null ? steps : `${steps}, ${shown(t[i])} min`;
  };

  // A cross-hair that follows the pointer or the arrow keys and shows the values there.
  const pointing = (plot, svg, box, width, describe, stops) => {
    const cross = make("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cross", visibility: "hidden" }, svg);
    const tip = html("div", "tip", plot);
    tip.hidden = true;
    tip.setAttribute("role", "status");
    let stop = -1;
    const show = (value) => {
      tip.replaceChildren();
      const x = describe(value, tip);
      const pixel = LEFT + ((x - box.x0) / (box.x1 - box.x0)) * (width - LEFT - RIGHT);
      cross.setAttribute("x1", pixel);
      cross.setAttribute("x2", pixel);
      cross.setAttribute("visibility", "visible");
      tip.hidden = false;
      const share = pixel / width;
      tip.style.left = share < 0.5 ? `calc(${share * 100}% + 10px)` : "auto";
      tip.style.right = share < 0.5 ? "auto" : `calc(${(1 - share) * 100}% + 10px)`;
    };
    const hide = () => {
      tip.hidden = true;
      stop = -1;
      cross.setAttribute("visibility", "hidden");
    };
    svg.addEventListener("pointermove", (event) => {
      const rectangle = svg.getBoundingClientRect();
      const pixel = ((event.clientX - rectangle.left) / rectangle.width) * width;
      show(box.x0 + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (box.x1 - box.x0));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      stop = Math.max(0, Math.min(stops.length - 1, stop < 0 ? (move > 0 ? 0 : stops.length - 1) : stop + move));
      if (stops.length) show(stops[stop]);
    });
  };

  const ends = (one) => {
    const finite = one.y.filter((value) => value !== null);
    const least = (one.lo || one.y).filter((value) => value !== null), most = (one.hi || one.y).filter((value) => value !== null);
    if (!finite.length) return "no finite value";
    const range = `minimum ${shown(Math.min(...least))}, maximum ${shown(Math.max(...most))}`;
    return `${one.lo ? "about " : ""}${shown(finite[0])} → ${shown(finite[finite.length - 1])}; ${range}`;
  };

  const drawChart = (figure) => {
    const chart = data.charts[Number(figure.dataset.chart)];
    const plot = figure.querySelector(".plot");
    plot.replaceChildren();
    const summaries = chart.curves.map((one) => (data.runs.length > 1 ? `${data.runs[one.run]}: ${ends(one)}` : ends(one)));
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": `${chart.title}. ${summaries.join(". ")}` }, plot);
    const box = limits(chart.curves);
    const scale = frame(svg, box, WIDTH);
    for (const one of chart.curves) {
      const at = data.axes[one.x][axis], look = `run-${one.run % 8} dash-${Math.floor(one.run / 8)}`;
      if (one.lo) make("path", { d: band(one, at, scale), class: `band ${look}` }, svg);
      make("path", { d: path(one, at, scale), class: `line ${look}` }, svg);
      if (at.length <= 60) for (let i = 0; i < at.length; i++) if (one.y[i] !== null && at[i] !== null) make("circle", { cx: scale.toX(at[i]), cy: scale.toY(one.y[i]), r: 2.2, class: `dot ${look}` }, svg);
    }
    const longest = chart.curves.reduce((best, one) => (data.axes[one.x].s.length > data.axes[best.x].s.length ? one : best));
    pointing(plot, svg, box, WIDTH, (value, tip) => {
      const i = nearest(data.axes[longest.x][axis], value);
      html("strong", "", tip, place(longest.x, i));
      for (const one of chart.curves) {
        const at = data.axes[one.x][axis], j = nearest(at, value);
        const line = html("div", "", tip);
        html("span", `swatch run-${one.run % 8}`, line);
        const elsewhere = one.x !== longest.x && data.axes[one.x].s[j] !== data.axes[longest.x].s[i] ? ` (${place(one.x, j)})` : "";
        html("span", "", line, (data.runs.length > 1 ? data.runs[one.run] : "value") + elsewhere);
        html("b", "", line, one.lo ? `${shown(one.y[j])} (${shown(one.lo[j])} to ${shown(one.hi[j])})` : shown(one.y[j]));
      }
      return data.axes[longest.x][axis][i];
    }, data.axes[longest.x][axis]);
    html("p", "last", plot, data.runs.length > 1 ? "" : summaries[0]);
  };

  const phaseNames = [...new Set(data.phases.flatMap((one) => (one.parts || []).map((part) => part.name)))];
  const phaseLook = (name) => (name === "others" ? "run-7" : `run-${phaseNames.filter((other) => other !== "others").indexOf(name) % 7}`);

  const drawPhases = (figure) => {
    const { x, parts } = data.phases[Number(figure.dataset.phases)];
    const plot = figure.querySelector(".plot"), width = 2 * WIDTH;
    plot.replaceChildren();
    const at = data.axes[x][axis];
    const sums = at.map((_, i) => parts.reduce((sum, part) => sum + (part.y[i] || 0), 0));
    const gap = at.length > 1 ? (at[at.length - 1] - at[0]) / (at.length - 1) || 1 : 1;
    const box = { x0: at[0] - gap / 2, x1: at[at.length - 1] + gap / 2, y0: 0, y1: Math.max(...sums) || 1 };
    const words = parts.map((part) => part.name).join(", ");
    const svg = make("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": `Stacked bars of the seconds of each step: ${words}. The table below has the totals.` }, plot);
    const { toX, toY } = frame(svg, box, width);
    const wide = Math.max(0.7, ((width - LEFT - RIGHT) / at.length) * 0.92);
    const base = at.map(() => 0);
    for (const part of parts) {
      let text = "";
      for (let i = 0; i < at.length; i++) {
        const value = part.y[i] || 0;
        if (value > 0) text += `M${(toX(at[i]) - wide / 2).toFixed(1)},${toY(base[i]).toFixed(1)}V${toY(base[i] + value).toFixed(1)}h${wide.toFixed(1)}V${toY(base[i]).toFixed(1)}Z`;
        base[i] += value;
      }
      make("path", { d: text, class: `dot ${phaseLook(part.name)}` }, svg);
    }
    pointing(plot, svg, box, width, (value, tip) => {
      const i = nearest(at, value);
      html("strong", "", tip, place(x, i));
      for (const part of [...parts].reverse()) {
        if (!(part.y[i] > 0)) continue;
        const line = html("div", "", tip);
        html("span", `swatch ${phaseLook(part.name)}`, line);
        html("span", "", line, part.name);
        html("b", "", line, `${shown(part.y[i])} s`);
      }
      return at[i];
    }, at);
  };

  const draw = (figure) => (figure.dataset.chart === undefined ? drawPhases(figure) : drawChart(figure));
  const drawOpen = () => document.querySelectorAll("figure").forEach((figure) => {
    const group = figure.closest("details");
    if (!group || group.open) draw(figure);
  });
  document.querySelectorAll("details.group").forEach((group) => group.addEventListener("toggle", () => {
    if (group.open) group.querySelectorAll("figure").forEach(draw);
  }));
  document.getElementById("axis").addEventListener("change", (event) => {
    axis = event.target.value;
    drawOpen();
  });
  document.getElementById("theme").addEventListener("change", (event) => {
    if (event.target.value) document.documentElement.dataset.theme = event.target.value;
    else delete document.documentElement.dataset.theme;
  });
  document.querySelectorAll("[data-phase]").forEach((swatch) => {
    const name = phaseNames.includes(swatch.dataset.phase) ? swatch.dataset.phase : "others";
    if (phaseNames.includes(name)) swatch.classList.add(phaseLook(name));
  });
  document.querySelectorAll("details.settings").forEach((section) => {
    const find = section.querySelector(".find"), chosen = section.querySelector(".chosen");
    if (!find) return;
    const sift = () => section.querySelectorAll("tbody tr").forEach((row) => {
      const fits = row.textContent.toLowerCase().includes(find.value.trim().toLowerCase());
      row.classList.toggle("off", !fits || (chosen.checked && !row.classList.contains("set")));
    });
    find.addEventListener("input", sift);
    chosen.addEventListener("change", sift);
  });
  drawOpen();
  document.documentElement.dataset.drawn = "yes";
})();
