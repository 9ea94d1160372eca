// The sliders of "when it flips": the lab's own Python, run in the page by Brython, which is loaded when one is first moved.
"use strict";

const ROOT_OF_PAGES = new URL("..", document.currentScript.src);  // this script lies in _static
let python = null;

function loadPython() {
  python ??= new Promise((loaded, failed) => {
    const script = Object.assign(document.createElement("script"), { src: new URL("_static/brython.js", ROOT_OF_PAGES).href });
    script.onload = loaded;
    script.onerror = () => failed(new Error("Python for this page could not be loaded"));
    document.head.append(script);
  });
  return python;
}

// The function of a formula, as the page's own: values in the order of its controls to what it prints.
async function answering(formula) {
  await loadPython();
  const name = `formula_${formula.function}`;
  __BRYTHON__.runPythonSource(formula.source, name);
  return (values) => window[name](...values);
}

for (const box of document.querySelectorAll(".formula")) {
  const formula = JSON.parse(box.querySelector("script").textContent);
  const rows = [...box.querySelectorAll(".control")].map((row) => [...row.querySelectorAll("input, select")]);
  const answer = box.querySelector("[role=status]"), when = box.querySelector(".when");
  let answers = null;
  const show = async () => {
    try {
      answers ??= answering(formula);
      const ask = await answers;
      answer.textContent = ask(rows.map(([typed]) => (typed.tagName === "SELECT" ? typed.value : typed.valueAsNumber)));
      when.textContent = "worked out in this page";
    } catch (error) {
      answer.textContent = String(error);
    }
  };
  for (const row of rows) {
    for (const moved of row) {
      moved.addEventListener("input", () => {
        const { badInput, rangeUnderflow, rangeOverflow } = moved.validity;  // numbers between the slider's steps are welcome
        if (badInput || rangeUnderflow || rangeOverflow || moved.value === "") return;  // only half typed
        for (const other of row) other.value = moved.value;
        show();
      });
    }
  }
}
