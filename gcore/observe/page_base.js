// What the pages share. Text from models and files is set only as textContent, never as markup.
const model = JSON.parse(document.getElementById("model").textContent);
const $ = (id) => document.getElementById(id);
const element = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

