// Browsers start no Worker for a page that was opened from a folder. A hidden frame runs the site's search there.
// The offline plugin of mkdocs-material takes a script of this name as a reason to load none from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.title = "Search"
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inside.document.createElement("script")
      this.started = new Promise((onload, onerror) => Object.assign(script, { src: url, onload, onerror }))
      this.inside.document.head.append(script)
    }

    postMessage(data) {
      this.started.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
