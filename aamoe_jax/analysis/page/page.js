"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const count = data.text.length;
  const KIND = { l: "local", c: "context", e: "expert" };
  const LOCAL_NAME = data.local === "window" ? "window" : "own chunk";
  const KIND_NAME = { local: data.local === "window" ? "local window" : "own chunk", context: "routed context", expert: "experts" };
  const state = { layer: 0, side: false, hovered: null, pinned: null, set: null, pinnedSet: null, row: null };
  const byId = (id) => document.getElementById(id);
  const passage = byId("passage");

  // Building blocks. Text goes in as text nodes alone.

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  const decimals = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  const signed = (value, digits) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
  const percent = (share) => {
    const value = 100 * share;
    if (value > 0 && value < 0.05) return "< 0.1 %";
    return `${value !== 0 && value < 9.95 ? value.toFixed(1) : value.toFixed(0)} %`;
  };
  const plural = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

  function bar(share, kind) {
    const inner = element("i");
    inner.style.width = `${Math.min(100, 100 * share)}%`;
    return element("span", { class: `bar ${kind || ""}`, "aria-hidden": "true" }, inner);
  }

  // Characters that would not be seen, or would move what follows.
  const MARKS = { "\n": "↵", "\t": "→", "\r": "␍" };
  const unprintable = /[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/u;

  function escaped(character) {
    return [...new TextEncoder().encode(character)].map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }

  /* The text of a token in the passage: line feeds and tabs are marked and do their work. */
  function written(text, form) {
    if (form === "x" || form === "c") {
      const shown = form === "x" ? text.split(" ").map((byte) => `\\x${byte}`).join("") : text;
      return [element("span", { class: form === "x" ? "hex" : "hex mark" }, shown)];
    }
    if (form === "h") return [element("span", { class: "part" }, text)];
    const parts = [];
    let plain = "";
    for (const character of text) {
      const mark = MARKS[character] || (unprintable.test(character) ? escaped(character) : null);
      if (mark === null) { plain += character; continue; }
      if (plain) parts.push(plain);
      plain = "";
      parts.push(element("span", { class: MARKS[character] ? "mark" : "hex" }, mark));
      if (character === "\n" || character === "\t") parts.push(character);
    }
    return plain ? [...parts, plain] : parts;
  }

  /* The same in one line, for chips and excerpts. */
  function inline(text, form) {
    if (form === "x") return text.split(" ").map((byte) => `\\x${byte}`).join("");
    if (form === "c") return `byte ${text}`;
    if (form === "s") return `‹${text}›`;
    return [...text].map((c) => MARKS[c] || (unprintable.test(c) ? escaped(c) : c)).join("");
  }
  const chipText = (text, form) => (/^ +$/.test(text) ? "␣".repeat(text.length) : inline(text, form));
  const shown = (token) => chipText(data.text[token], data.forms[token]);
  const excerpt = (start, stop) => {
    let text = "";
    for (let i = start; i < stop; i++) if (data.forms[i] !== "c") text += inline(data.text[i], data.forms[i]);
    return text;
  };

  // What the layers hold.

  for (const layer of data.layers) {
    layer.offset = [0];
    for (const spent of layer.spent) layer.offset.push(layer.offset[layer.offset.length - 1] + spent);
    layer.usersOf = new Map(layer.uses.map((use) => [use.expert, []]));
    for (let token = 0; token < count; token++) {
      for (let slot = layer.offset[token]; slot < layer.offset[token + 1]; slot++) {
        if (layer.kind[slot] === "e") layer.usersOf.get(layer.place[slot]).push(token);
      }
    }
  }
  const current = () => data.layers[state.layer];

  /* The resources of a token, best first. */
  function resources(token, layer = current()) {
    const found = [];
    for (let slot = layer.offset[token]; slot < layer.offset[token + 1]; slot++) {
      found.push({
        rank: slot - layer.offset[token] + 1, kind: KIND[layer.kind[slot]], place: layer.place[slot],
        start: layer.place[slot], stop: layer.place[slot] + layer.length[slot],
        probability: layer.probability[slot], mass: layer.mass[slot],
      });
    }
    return found;
  }

  const nameOf = ({ kind, place, start }) => ({ local: LOCAL_NAME, context: `chunk ${Math.floor(start / data.chunk)}`, expert: `expert ${place}` })[kind];

  const lines = [];
  data.text.reduce((line, text, token) => { lines[token] = line; return line + (text.match(/\n/g) || []).length; }, 1);

  // The scale: at most eight steps, one per count while counts are few. All layers share it.

  const most = Math.max(1, ...data.layers.map((layer) => Math.max(...layer.spent)));
  const edges = [];
  for (let k = 0; k < Math.min(8, most); k++) {
    const geometric = Math.round(Math.exp((Math.log(most) * k) / 7));
    edges.push(most <= 8 ? k + 1 : Math.max(geometric, (edges[k - 1] || 0) + 1));
  }
  const tone = (step) => (edges.length === 1 ? 5 : 1 + Math.round((7 * step) / (edges.length - 1)));
  function level(spent) {
    let step = -1;
    while (step + 1 < edges.length && edges[step + 1] <= spent) step++;
    return step < 0 ? null : tone(step);
  }

  function drawLegend() {
    const scale = element("span", { class: "scale" });
    edges.forEach((edge, step) => {
      const last = step + 1 < edges.length ? edges[step + 1] - 1 : most;
      const label = element("span", { class: "step" }, last > edge ? `${edge}–${last}` : `${edge}`);
      label.style.background = `var(--b${tone(step)})`;
      label.style.color = `var(--i${tone(step)})`;
      scale.append(label);
    });
    byId("legend").append("resources given", element("span", { class: "none" }, "none"), scale);
    byId("legend").setAttribute("aria-label", `Colour scale: resources given to a token, from none to ${most}; darker is more`);
  }

  // Head and totals.

  function drawHead() {
    byId("source").textContent = data.source;
    byId("facts").append(...data.facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    byId("notes").hidden = data.notes.length === 0;
    byId("notes").append(...data.notes.map((note) => element("li", {}, note)));
    data.layers.forEach((layer, index) => {
      byId("layers").append(element(
        "button", { type: "button", role: "radio", onclick: () => { setLayer(index); } },
        `Layer ${layer.number}`, element("small", {}, `${decimals(layer.totals.spent, 2)} per token`),
      ));
    });
  }

  function drawTotals() {
    const { totals } = current();
    const unused = data.experts - current().uses.length;
    const tiles = [
      ["resources per token", [decimals(totals.spent, 2)]],
      ["tokens without any", [percent(totals.zero_budget)]],
      ["most on one token", [String(totals.max_budget)]],
    ];
    if (totals.clip_rate > 0) tiles.push(["of the budget cut off", [percent(totals.clip_rate)]]);
    if (data.experts) tiles.push(["dead experts here", [`${unused} `, element("small", {}, `of ${data.experts}`)]]);
    byId("tiles").replaceChildren(...tiles.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, ...value))));
    const rows = [];
    for (const [measure, name] of [["pairs", "resources"], ["mass", "attention"]]) {
      const stack = element("div", { class: "stack", role: "img" });
      const said = [];
      for (const kind of ["local", "context", "expert"]) {
        const share = totals[`${measure}_${kind}`];
        said.push(`${KIND_NAME[kind]} ${percent(share)}`);
        if (share <= 0) continue;
        const piece = element("span", { class: kind, title: `${KIND_NAME[kind]}: ${percent(share)}` }, element("b", {}, percent(share)));
        piece.style.flex = `${share} 0 0`;
        stack.append(piece);
      }
      stack.setAttribute("aria-label", `Share of ${name}: ${said.join(", ")}`);
      rows.push(element("span", {}, name), stack);
    }
    const key = ["local", "context", "expert"].map((kind) => element("span", {}, element("i", { class: `dot ${kind}` }), KIND_NAME[kind]));
    byId("shares").replaceChildren(...rows, element("div", { class: "key" }, ...key));
  }

  // The passage: once, for the chosen layer, or once for every layer, side by side.

  let panels = []; // their index among the layers, null for the chosen one; an element for every token
  const layerOf = (panel) => data.layers[panel.layer === null ? state.layer : panel.layer];
  const chosenPanel = () => panels.find((panel) => panel.layer === state.layer) || panels[0];
  const spotOf = (token) => chosenPanel().spots[token];

  function drawPassage() {
    panels = (state.side ? [...data.layers.keys()] : [null]).map((layer) => ({
      layer,
      spots: data.text.map((text, token) => element(
        "span", { class: "t", role: "option", "data-token": token, tabindex: token === roving ? 0 : -1, "aria-selected": "false" },
        ...written(text, data.forms[token]),
      )),
    }));
    const label = "Tokens of the passage, coloured by the resources that they were given";
    passage.classList.toggle("side", state.side);
    passage.replaceChildren(...panels.map((panel) => element(
      "div", { class: "one", "data-panel": panel.layer },
      state.side ? element("h2", {}, `Layer ${layerOf(panel).number}`) : null,
      element("div", { class: "passage", role: "listbox", tabindex: -1, "aria-label": state.side ? `${label} in layer ${layerOf(panel).number}` : label }, ...panel.spots),
    )));
    byId("side").setAttribute("aria-pressed", String(state.side));
  }

  function paint() {
    for (const panel of panels) {
      layerOf(panel).spent.forEach((spent, token) => {
        const found = level(spent);
        if (found === null) panel.spots[token].removeAttribute("data-level");
        else panel.spots[token].setAttribute("data-level", found);
      });
    }
  }

  let lit = [];
  function light(spots, kind, strong) {
    for (const spot of spots) {
      spot.classList.add("lit", `is-${kind}`);
      if (strong) spot.classList.add("strong");
      lit.push(spot);
    }
  }
  const range = (start, stop) => Array.from({ length: stop - start }, (_, i) => start + i);

  const focus = () => (state.pinned !== null ? state.pinned : state.hovered);
  const chosenSet = () => state.set || state.pinnedSet;

  /* Marks in the text what is being looked at: a set of tokens (an expert's, the repeated ones), or one token's resources. */
  function highlight() {
    for (const spot of lit) {
      spot.classList.remove("lit", "strong", "is-local", "is-context", "is-expert", "is-copy", "active");
      spot.removeAttribute("data-rank");
      spot.setAttribute("aria-selected", "false");
    }
    lit = [];
    const set = chosenSet(), token = focus();
    passage.classList.toggle("focusing", set !== null || token !== null);
    for (const panel of panels) {
      passage.children[panels.indexOf(panel)].classList.toggle("chosen", panel.layer === state.layer);
      if (set) light(tokensOf(set, layerOf(panel)).map((one) => panel.spots[one]), set.kind, false);
      else if (token !== null) lightResources(panel, token);
    }
  }

  /* Marks what a token was given in the layer of a panel. */
  function lightResources(panel, token) {
    for (const resource of resources(token, layerOf(panel))) {
      const strong = panel === chosenPanel() && state.row === resource.rank;
      if (resource.kind === "expert") {
        if (strong) light(layerOf(panel).usersOf.get(resource.place).map((user) => panel.spots[user]), "expert", true);
        continue;
      }
      light(panel.spots.slice(resource.start, resource.stop), resource.kind, strong);
      if (resource.kind === "context") panel.spots[resource.start].setAttribute("data-rank", resource.rank);
    }
    panel.spots[token].classList.add("active");
    panel.spots[token].setAttribute("aria-selected", "true");
    lit.push(panel.spots[token]);
  }

  function tokensOf(set, layer) {
    if (set.kind === "expert") return layer.usersOf.get(set.key) || [];
    return range(0, count).filter((token) => data.repeat[token] >= set.key);
  }

  // The pane of one token.

  function tokenPane() {
    const token = focus();
    if (token === null) {
      return [
        element("p", { class: "hint" }, "Point at a token to see what it was given: its resources in rank order, marked in the text."),
        element("p", { class: "hint" }, "Click it to keep it while you change the layer."),
        element("div", { class: "dearest" }, element("h2", {}, `Given most in layer ${current().number}`), dearest()),
      ];
    }
    const layer = current(), given = resources(token);
    const pinned = state.pinned === token;
    const chunk = Math.floor(token / data.chunk);
    const head = element(
      "div", { class: "who" },
      element("span", { class: "glyph" }, shown(token)),
      element("div", {},
        element("b", {}, `Token ${token}`),
        element("div", { class: "place" }, `line ${lines[token]}, chunk ${chunk}`)),
      element("button", { type: "button", class: "pin", "aria-pressed": String(pinned), onclick: () => pin(pinned ? null : token) }, pinned ? "pinned" : "pin"),
    );
    const figures = [
      [`given in layer ${layer.number}`, [String(layer.spent[token])]],
      ["its budget Bᵢ", [decimals(layer.budget[token], 2)]],
      ["its own surprise", [decimals(data.bits[token], 2), element("small", {}, data.bits[token] === null ? "" : " bits")]],
    ];
    const pane = [head, element("dl", { class: "figures" }, ...figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, ...value))))];
    // What floor(B_i) exceeds, as far as rounding lets one say.
    if (Math.floor(layer.budget[token] - 0.006) > layer.spent[token]) {
      pane.push(element("p", { class: "warn" }, `Bᵢ would buy ${Math.floor(layer.budget[token])}: cut off by what is available, the most per token or the running cap.`));
    }
    pane.push(element("h2", {}, "Resources, best first"), given.length ? resourceTable(given) : element("p", { class: "hint" }, "None: the token passes this layer by."));
    pane.push(element("h2", {}, "Given in every layer"), depth(token), element("h2", {}, "What it then predicts"), ...prediction(token));
    return pane;
  }

  /* The tokens with the largest budgets, in their context. */
  function dearest() {
    const { spent, budget } = current();
    const order = range(0, count).sort((a, b) => spent[b] - spent[a] || budget[b] - budget[a] || a - b).slice(0, 8);
    const rows = order.map((token) => {
      const go = () => { pin(token); spotOf(token).scrollIntoView({ block: "nearest" }); };
      return element(
        "tr", { class: "pick", tabindex: 0, role: "button", "aria-label": `Token ${token}`, onclick: go,
          onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); go(); spotOf(token).focus(); } } },
        element("td", { class: "rank" }, String(token)), element("td", {}, inContext(token, 16)), element("td", { class: "number" }, String(spent[token])),
      );
    });
    return element("table", {}, element("tbody", {}, ...rows));
  }

  function resourceTable(given) {
    const rows = given.map((resource) => {
      const { kind } = resource;
      const about = kind === "expert"
        ? element("span", { class: "excerpt" }, `${plural(current().usersOf.get(resource.place).length, "token")} here`)
        : element("span", { class: "excerpt", title: `tokens ${resource.start}–${resource.stop - 1}` }, excerpt(resource.start, resource.stop).replace(/ {3,}/g, "  "));
      const point = (rank) => () => { state.row = rank; highlight(); };
      return element(
        "tr", { class: `resource pick ${kind}-row`, tabindex: 0, "data-kind": kind, "data-start": resource.start, "data-stop": resource.stop,
          onmouseenter: point(resource.rank), onmouseleave: point(null), onfocus: point(resource.rank), onblur: point(null) },
        element("td", { class: "rank" }, String(resource.rank)),
        element("td", {}, element("span", { class: "name" }, element("i", { class: `dot ${kind}` }), nameOf(resource)), about),
        element("td", { class: "number" }, percent(resource.probability), bar(resource.probability, kind)),
        element("td", { class: "number" }, percent(resource.mass), bar(resource.mass, kind)),
      );
    });
    return element(
      "table", { class: "resources" },
      element("thead", {}, element("tr", {},
        element("th", { scope: "col" }, element("span", { "aria-label": "rank" }, "#")), element("th", { scope: "col" }, "resource"),
        element("th", { scope: "col", class: "number", title: "P(i, j): that the budget affords this rank, times the router's share" }, "P(i, j)"),
        element("th", { scope: "col", class: "number", title: "share of the token's attention, mean over heads" }, "attention"))),
      element("tbody", {}, ...rows),
    );
  }

  function depth(token) {
    return element("div", { class: "depth" }, ...data.layers.map((layer, index) => element(
      "button", { type: "button", "aria-current": String(index === state.layer), "aria-label": `Layer ${layer.number}: ${layer.spent[token]}`, onclick: () => setLayer(index) },
      element("b", { "data-level": level(layer.spent[token]) }, String(layer.spent[token])), `${layer.number}`,
    )));
  }

  function prediction(token) {
    const rows = [];
    const next = token + 1 < count ? data.text[token + 1] : null;
    const nextForm = token + 1 < count ? data.forms[token + 1] : null;
    const isNext = ([text, form]) => {
      if (next === null) return false;
      // In the passage a character may stand in the first of its parts; alone that part is a byte.
      if (nextForm === "h" || nextForm === "c") return false;
      return text === next && form === nextForm;
    };
    data.likely[token].forEach((id, place) => {
      const name = data.names[id], share = data.likelyShare[token][place];
      rows.push(element("span", { class: isNext(name) ? "chip right" : "chip" }, chipText(...name)), bar(share), element("span", { class: "number" }, percent(share)));
    });
    const after = next === null
      ? element("p", { class: "aside" }, "The passage ends here.")
      : element("p", { class: "aside" }, "What came: ", element("span", { class: "chip" }, shown(token + 1)), ` at ${decimals(data.bits[token + 1], 2)} bits.`);
    return [element("div", { class: "guess" }, ...rows), after];
  }

  // The panes of experts and of repetition: rows that stand for sets of tokens.

  function setRow(set, label, cells) {
    const same = (other) => other !== null && other.kind === set.kind && other.key === set.key;
    const choose = () => { state.pinnedSet = same(state.pinnedSet) ? null : set; state.pinned = null; update(); };
    const on = same(state.pinnedSet);
    const point = (pointed) => () => { state.set = pointed; highlight(); };
    return element(
      "tr", { class: on ? "pick on" : "pick", tabindex: 0, role: "button", "aria-pressed": String(on), "aria-label": label, "data-set": `${set.kind}-${set.key}`,
        onclick: () => { state.set = null; choose(); },
        onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); state.set = null; choose(); refocus(set); } },
        onmouseenter: point(set), onmouseleave: point(null), onfocus: point(set), onblur: point(null) },
      ...cells,
    );
  }
  const refocus = (set) => { const row = document.querySelector(`[data-set="${set.kind}-${set.key}"]`); if (row) row.focus(); };

  /* A token between its neighbours, itself always in the same column. */
  function inContext(token, reach) {
    const before = excerpt(Math.max(0, token - reach), token);
    const line = element("span", { class: "excerpt wide" });
    line.append(before.slice(-reach).padStart(reach), element("b", {}, shown(token)), excerpt(token + 1, Math.min(count, token + 1 + reach)).slice(0, reach));
    return line;
  }

  function expertsPane() {
    const { uses } = current();
    if (!data.experts) return [element("p", { class: "hint" }, "This model has no experts.")];
    const attention = uses.reduce((sum, use) => sum + use.mass, 0) || 1;
    const rows = uses.map((use) => setRow(
      { kind: "expert", key: use.expert }, `Expert ${use.expert}, ${plural(use.tokens, "token")}`,
      [
        element("td", { class: "name" }, element("i", { class: "dot expert" }), String(use.expert)),
        element("td", { class: "number" }, String(use.tokens), bar(use.tokens / count, "expert")),
        element("td", { class: "number" }, percent(use.mass / attention), bar(use.mass / attention, "expert")),
        element("td", {}, ...use.examples.map((token) => inContext(token, 9))),
      ],
    ));
    const unused = range(0, data.experts).filter((expert) => !current().usersOf.has(expert));
    return [
      element("p", { class: "hint" }, `Layer ${current().number}. Point at an expert to see its tokens, click to keep them marked.`),
      element("h2", {}, ""),
      element("table", { class: "experts" },
        element("thead", {}, element("tr", {},
          element("th", { scope: "col" }, "expert"), element("th", { scope: "col", class: "number" }, "tokens"),
          element("th", { scope: "col", class: "number", title: "of the attention that all experts get" }, "attention"),
          element("th", { scope: "col" }, "where it gets most"))),
        element("tbody", {}, ...rows)),
      element("p", { class: "aside" }, unused.length ? `Not used here: ${unused.join(", ")}.` : "Every expert is used."),
    ];
  }

  // The pane of the map: a row for every token, a column for every chunk and for every expert that is used.

  const numChunks = Math.ceil(count / data.chunk);

  function mapPane() {
    const layer = current(), experts = [...layer.usersOf.keys()].sort((a, b) => a - b), placeOf = new Map(experts.map((expert, place) => [expert, place]));
    const columns = numChunks + experts.length, height = Math.max(1, Math.min(6, Math.floor(640 / count)));
    const canvas = element("canvas", { class: "map", width: 4 * columns, height: height * count, role: "img",
      "aria-label": `Attention of every token of layer ${layer.number} to its chunks and experts; the Token tab has it in figures` });
    canvas.style.height = `${height * count}px`;
    const columnOf = ({ kind, place }, token) => (kind === "expert" ? numChunks + placeOf.get(place) : Math.floor((kind === "local" ? token : place) / data.chunk));
    const draw = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colours = Object.fromEntries(["local", "context", "expert"].map((kind) => [kind, style.getPropertyValue(`--${kind}`).trim()]));
    for (let token = 0; token < count; token++) {
      for (const resource of resources(token)) {
        draw.fillStyle = colours[resource.kind];
        draw.globalAlpha = 0.15 + 0.85 * Math.sqrt(resource.mass);
        draw.fillRect(4 * columnOf(resource, token), height * token, 4, height);
      }
    }
    const readout = element("p", { class: "readout", "aria-live": "polite" }, "Point at the map.");
    const point = (token, column) => {
      const name = column < numChunks ? `chunk ${column}` : `expert ${experts[column - numChunks]}`;
      const found = resources(token).filter((resource) => columnOf(resource, token) === column);
      const given = found.map(({ kind, rank, mass }) => `${kind === "local" ? LOCAL_NAME : name}, rank ${rank}, ${percent(mass)} of its attention`);
      state.hovered = token;
      state.row = focus() === token && found.length ? found[0].rank : null;
      readout.textContent = `Token ${token} (${shown(token)}): ${given.join("; ") || `nothing of ${name}`}.`;
      highlight();
    };
    const cellOf = (event) => {
      const box = canvas.getBoundingClientRect(), at = (place, size, cells) => Math.min(cells - 1, Math.max(0, Math.floor((place / size) * cells)));
      return [at(event.clientY - box.top, box.height, count), at(event.clientX - box.left, box.width, columns)];
    };
    canvas.addEventListener("mousemove", (event) => point(...cellOf(event)));
    canvas.addEventListener("mouseleave", () => { state.hovered = null; state.row = null; highlight(); });
    canvas.addEventListener("click", (event) => pin(cellOf(event)[0]));
    const heads = [[numChunks, "chunks, first to last"], [experts.length, plural(experts.length, "expert")]].filter(([cells]) => cells);
    return [
      element("p", { class: "hint" }, `Layer ${layer.number}. Down: the tokens. Across: where their budgets went; the stronger a colour, the more attention.`),
      readout,
      element("div", { class: "heads" }, ...heads.map(([cells, name]) => { const head = element("span", {}, name); head.style.flex = `${cells} 0 0`; return head; })),
      canvas,
    ];
  }

  function copiesPane() {
    const rows = data.copies.map((entry) => {
      const { n, copied, novel, difference } = entry;
      const spent = difference && difference.spent[state.layer];
      const cell = (value) => element("td", { class: "number" }, value);
      return setRow({ kind: "copy", key: n }, `Repeats of ${n} tokens`, [
        element("td", { class: "name" }, `${n}`),
        cell(String(copied.tokens)),
        cell(copied.tokens ? decimals(copied.spent[state.layer], 2) : "–"),
        cell(novel.tokens ? decimals(novel.spent[state.layer], 2) : "–"),
        element("td", { class: "number" }, spent ? signed(spent[0], 2) : "–", spent && spent[1] !== null ? element("span", { class: "excerpt" }, `± ${spent[1].toFixed(2)}`) : null),
        cell(copied.tokens ? decimals(copied.nats / Math.LN2, 2) : "–"),
        cell(novel.tokens ? decimals(novel.nats / Math.LN2, 2) : "–"),
      ]);
    });
    return [
      element("p", { class: "hint" }, `Layer ${current().number}. A token is repeated at n when the n tokens that end with it stand earlier in the passage.`),
      element("h2", {}, ""),
      element("table", { class: "copies" },
        element("thead", {},
          element("tr", {}, element("th", { colspan: 2 }), element("th", { colspan: 3, scope: "colgroup", class: "number" }, "resources per token"), element("th", { colspan: 2, scope: "colgroup", class: "number" }, "bits of the next")),
          element("tr", {}, ...["n", "tokens", "repeated", "new", "difference", "repeated", "new"].map((name, place) => element("th", { scope: "col", class: place ? "number" : null }, name)))),
        element("tbody", {}, ...rows)),
      element("p", { class: "aside" }, "± one standard error over chunks. One passage is anecdote: launch.inspect --copies measures the held-out split, also at equal token and position."),
    ];
  }

  // Events.

  const PANES = { token: tokenPane, map: mapPane, experts: expertsPane, copies: copiesPane };
  let tab = "token";

  function setTab(name) {
    tab = name;
    for (const other of Object.keys(PANES)) {
      byId(`tab-${other}`).setAttribute("aria-selected", String(other === name));
      byId(`tab-${other}`).tabIndex = other === name ? 0 : -1;
      byId(`pane-${other}`).hidden = other !== name;
    }
    update();
  }

  function update() {
    byId(`pane-${tab}`).replaceChildren(...PANES[tab]());
    highlight();
  }

  function setLayer(index) {
    state.layer = (index + data.layers.length) % data.layers.length;
    [...byId("layers").children].forEach((button, place) => {
      button.setAttribute("aria-checked", String(place === state.layer));
      button.tabIndex = place === state.layer ? 0 : -1;
    });
    if (!state.side) paint();
    drawTotals();
    update();
  }

  function setSide(side) {
    state.side = side;
    drawPassage();
    paint();
    update();
  }

  function describe(token) {
    const spent = current().spent[token];
    spotOf(token).setAttribute("aria-label", `Token ${token}, ${shown(token)}: ${spent ? `${plural(spent, "resource")}, ${resources(token).map(nameOf).join(", ")}` : "no resource"}`);
  }

  function hover(token) {
    state.hovered = token;
    state.row = null;
    if (token !== null) describe(token);
    if (state.pinned !== null || state.pinnedSet !== null) return;
    if (tab === "map") highlight();
    else if (token !== null && tab !== "token") setTab("token");
    else update();
  }

  function pin(token) {
    state.pinned = token;
    state.row = null;
    state.pinnedSet = null;
    if (token !== null) {
      rove(token);
      setTab("token");
    } else update();
  }

  let roving = 0;
  function rove(token) {
    for (const { spots } of panels) {
      spots[roving].tabIndex = -1;
      spots[token].tabIndex = 0;
    }
    roving = token;
  }
  const tokenOf = (target) => { const spot = target.closest(".t"); return spot ? Number(spot.dataset.token) : null; };

  /* The layer of the panel that is pointed at becomes the chosen one. */
  function enter(target) {
    const panel = target.closest("[data-panel]");
    if (panel && Number(panel.dataset.panel) !== state.layer) setLayer(Number(panel.dataset.panel));
  }

  /* One token on, or to the start of another line. */
  function step(from, direction, byLine) {
    if (!byLine) return Math.min(count - 1, Math.max(0, from + direction));
    const line = lines[from] + direction;
    const first = lines.indexOf(line);
    return first >= 0 ? first : direction > 0 ? count - 1 : 0;
  }

  function listen() {
    passage.addEventListener("mouseover", (event) => { const token = tokenOf(event.target); if (token === null) return; if (state.pinned === null) enter(event.target); if (token !== state.hovered) hover(token); });
    passage.addEventListener("mouseleave", () => hover(null));
    passage.addEventListener("focusin", (event) => { const token = tokenOf(event.target); if (token !== null) { enter(event.target); rove(token); hover(token); } });
    passage.addEventListener("focusout", () => hover(null));
    passage.addEventListener("click", (event) => { const token = tokenOf(event.target); if (token === null) return; enter(event.target); pin(state.pinned === token ? null : token); });
    passage.addEventListener("keydown", (event) => {
      const token = tokenOf(event.target);
      if (token === null || event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        const next = step(token, event.key === "ArrowDown" ? 1 : -1, event.shiftKey);
        if (state.pinned !== null) pin(next);
        spotOf(next).focus();
      } else if (event.key === "Enter" || event.key === " ") pin(state.pinned === token ? null : token);
      else return;
      event.preventDefault();
    });
    document.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
      if (event.key === "Escape") { state.pinnedSet = null; state.set = null; pin(null); return; }
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const step = event.key === "ArrowRight" ? 1 : -1;
      if (event.target.closest(".tabs")) {
        const names = Object.keys(PANES);
        setTab(names[(names.indexOf(tab) + step + names.length) % names.length]);
        byId(`tab-${tab}`).focus();
      } else {
        setLayer(state.layer + step);
        if (event.target.closest("#layers")) byId("layers").children[state.layer].focus();
      }
      event.preventDefault();
    });
    for (const name of Object.keys(PANES)) byId(`tab-${name}`).addEventListener("click", () => setTab(name));
    byId("side").hidden = data.layers.length < 2;
    byId("side").addEventListener("click", () => setSide(!state.side));
  }

  drawHead();
  drawLegend();
  drawPassage();
  listen();
  setLayer(0);
  setTab("token");
})();
