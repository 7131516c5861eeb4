// Contrast of every visible text against what lies behind it, as [ratio, text].
(() => {
  const parse = (color) => { const n = color.match(/[\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const ground = (node) => {
    const layers = [];
    for (let one = node; one; one = one.parentElement) layers.push(parse(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility({ visibilityProperty: true })) continue;
    if (node.closest("noscript, .skip")) continue;
    const under = ground(node);
    let opacity = 1;
    for (let one = node; one; one = one.parentElement) opacity *= getComputedStyle(one).opacity;
    const ink = parse(getComputedStyle(node).color);
    const top = over([ink[0], ink[1], ink[2], ink[3] * opacity], under);
    const [high, low] = [light(top), light(under)].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), walker.currentNode.textContent.trim()]);
  }
  return found;
})()
