// Search in pages that are opened as files: browsers run no workers there, so a hidden frame runs
// the search's script in place of one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];  // messages for the script until it is loaded
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (source) => new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        script.src = source;
        script.onload = resolve;
        script.onerror = reject;
        this.scope.document.body.append(script);
      });
      this.scope.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      load(url).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.scope.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
