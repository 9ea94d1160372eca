// The start page's search, as labsupport/learner/guide.py does it: scores by BM25 come ready made, from tools/book.py.
"use strict";

function makeSearch(index, stem) {
  const known = new Set(Object.keys(index.phrases));
  const synonym = new RegExp(`\\b(?:${Object.keys(index.synonyms).sort((a, b) => b.length - a.length).join("|")})\\b`, "g");

  function pieces(text) {
    const found = [];
    for (const name of text.match(/[\p{L}\p{N}_]+/gu) ?? []) {
      const parts = name.replace(/(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_/g, " ").toLowerCase().split(" ").filter(Boolean);
      found.push(...parts.map(stem), ...(parts.length > 1 ? [stem(parts.join(""))] : []));
    }
    return found;
  }

  function words(text) {
    text = pieces(text.replace(/shape\s?\[[\d, ]*\]|(\bon )?\/job:\S+|\bby allocator \w+/g, " ")).join(" ");
    text = text.replace(synonym, (match) => index.synonyms[match]);
    const telling = (word) => !index.stopwords.includes(word) && !(/^\d+$/.test(word) && word.length !== 3);
    return [...new Set(text.split(" ").filter((word) => word && telling(word)))];
  }

  // A word that no lab knows stands for those that it begins: it may still be typed.
  const meant = (word) => (known.has(word) ? [word] : word.length > 2 ? [...known].filter((one) => one.startsWith(word)) : []);

  return function search(query) {
    const asked = words(query);
    const stems = [...new Set(asked.flatMap(meant))];
    const best = index.labs.map(() => [0, ""]), whole = index.labs.map(() => 0), scores = new Map();
    for (const one of stems) {
      for (const [phrase, score] of index.phrases[one]) scores.set(phrase, (scores.get(phrase) ?? 0) + score);
      for (const [lab, score] of index.wholes[one] ?? []) whole[lab] += score;
    }
    for (const [phrase, score] of scores) {
      const [lab, text] = index.texts[phrase];
      if (score > best[lab][0]) best[lab] = [score, text];
    }
    const ranked = index.labs.map((lab, place) => ({ ...lab, phrase: best[place][1], score: best[place][0] + index.whole * whole[place] }));
    ranked.sort((one, other) => other.score - one.score);
    const rows = ranked.filter((lab) => lab.score > index.worth * ranked[0].score);
    const well = Math.max(...best.map(([score]) => score)) >= index.fits * Math.min(asked.length, index.many);
    return { rows, well, asked: asked.length };
  };
}

function show(found, box) {
  const say = (text) => Object.assign(document.createElement("p"), { textContent: text });
  box.replaceChildren();
  if (!found.asked) return;
  if (!found.well) box.append(say("Nothing fits well: begin with lab 19, or let the doctor look at your script."));
  if (!found.rows.length) return;
  const list = document.createElement("ol");
  for (const lab of found.rows) {
    const link = Object.assign(document.createElement("a"), { href: `labs/${lab.name}.html`, textContent: `${lab.number} ${lab.title}` });
    const row = document.createElement("li");
    row.append(link, document.createElement("br"), lab.phrase);
    list.append(row);
  }
  box.append(list);
}

if (typeof document !== "undefined" && document.getElementById("symptom")) {
  const search = makeSearch(SYMPTOMS, (word) => new EnglishStemmer().stemWord(word));
  const box = document.getElementById("symptom");
  box.addEventListener("input", () => show(search(box.value), document.getElementById("found")));
}
