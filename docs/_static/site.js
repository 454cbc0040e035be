// A button that copies a block of code. Of a console's block it copies the commands only: lines that
// begin with "$ ", without that, and their continuation lines.
"use strict";

function commandsOf(text) {
  const lines = text.replace(/\n$/, "").split("\n");
  if (!lines.some((line) => line.startsWith("$ "))) return lines.join("\n");
  return lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2)).join("\n");
}

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    if (block.closest(".highlight-text, .highlight-none, .highlight-json")) continue;
    const button = document.createElement("button");
    button.className = "copy-code";
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(commandsOf(block.querySelector("pre").textContent));
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    block.append(button);
  }
});
