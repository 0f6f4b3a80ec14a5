/* Search runs in a worker, and a browser gives none to a page that is opened from the disk: there a hidden frame does the
   work, with the two functions of a worker that the search calls. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...scripts) => Promise.all(scripts.map(one => this.load(one)))
      this.ready = this.load(script)
    }

    load(script) {
      return new Promise((loaded, failed) => {
        const tag = this.inside.document.createElement("script")
        Object.assign(tag, { src: script, async: false, onload: loaded, onerror: failed })
        this.inside.document.body.append(tag)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
