// The pictures of the next message: chosen, dropped or pasted, shown as thumbnails, and told to
// screen readers. They are sent as data URLs; which bytes a picture is decides its first bytes.

import {bytes, el, times} from './dom.js';

export const ONE_MAX = 16 * 2 ** 20;  // bytes of a picture
export const ALL_MAX = 48 * 2 ** 20;  // of those of a message, which is sent again with the next
const KINDS = [['png', [0x89, 0x50, 0x4e, 0x47]], ['jpeg', [0xff, 0xd8, 0xff]]];

async function kindOf(file) {
  const first = new Uint8Array(await file.slice(0, 4).arrayBuffer());
  return KINDS.find(([, begin]) => begin.every((byte, at) => first[at] === byte))?.[0];
}

function inBase64(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result.slice(reader.result.indexOf(',') + 1));
    reader.onerror = () => failed(new Error(`${file.name} can't be read`));
    reader.readAsDataURL(file);
  });
}

// A picture as a part of a message, and as it is shown in the conversation.
export const partOf = ({url}) => ({type: 'image_url', image_url: {url}});
export const shownOf = ({url, name}) => el('img', {src: url, alt: name});

export class Pictures {
  // `sees` says whether a model that is asked does.
  constructor(sees) {
    this.sees = sees;
    this.all = [];
    this.input = el('input', {
      type: 'file',
      accept: 'image/png,image/jpeg',
      multiple: true,
      hidden: true,
      'aria-label': 'Pictures',
      onchange: () => this.add([...this.input.files]).then(() => this.input.value = ''),
    });
    const facts = {type: 'button', id: 'picture', title: 'Add PNG or JPEG files'};
    this.button = el('button', {...facts, onclick: () => this.input.click()}, 'Picture');
    this.list = el('ul', {className: 'pictures', 'aria-label': 'Pictures of the next message'});
    this.told = el('p', {className: 'told', role: 'status'});
    this.root = el('div', {}, this.list, this.told, this.input);
    this.show();
  }

  // Takes what is dropped on an element, and what is pasted in it.
  listen(place) {
    const files = event => [...(event.dataTransfer ?? event.clipboardData)?.files ?? []];
    const has = event => event.dataTransfer?.types.includes('Files');
    const mark = on => place.classList.toggle('dropping', on);
    place.addEventListener('dragover', event => {
      if (!has(event)) return;
      event.preventDefault();
      mark(true);
    });
    place.addEventListener('dragleave', event => {
      if (!place.contains(event.relatedTarget)) mark(false);
    });
    for (const kind of ['drop', 'paste'])
      place.addEventListener(kind, event => {
        mark(false);
        // A text that is pasted may bring a picture of itself.
        if (!files(event).length || event.clipboardData?.getData('text')) return;
        event.preventDefault();
        this.add(files(event));
      });
  }

  async add(files) {
    const refused = [], before = this.all.length;
    for (const file of files) {
      try {
        this.all.push(await this.read(file));
      } catch (error) {
        refused.push(error.message);
      }
    }
    const added = this.all.length - before;
    this.show();
    this.tell([...refused, added && `${times(added, 'picture')} added`], refused.length);
  }

  async read(file) {
    if (!this.sees()) throw new Error('This model takes no pictures.');
    const kind = await kindOf(file);
    if (!kind) throw new Error(`${file.name} is no PNG or JPEG file.`);
    const whole = this.all.reduce((sum, one) => sum + one.size, file.size);
    const [size, most, what] =
        file.size > ONE_MAX ? [file.size, ONE_MAX, file.name] : [whole, ALL_MAX, 'The pictures'];
    if (size > most) {
      const verb = what === file.name ? 'has' : 'have';
      throw new Error(`${what} ${verb} ${bytes(size)}; at most ${bytes(most)} are sent.`);
    }
    const url = `data:image/${kind};base64,${await inBase64(file)}`;
    return {name: file.name, size: file.size, url};
  }

  tell(sentences, bad = 0) {
    this.told.classList.toggle('bad', bad > 0);
    this.told.textContent = sentences.filter(Boolean).join(' ');
  }

  remove(picture) {
    const at = this.all.indexOf(picture);
    this.all.splice(at, 1);
    this.show();
    this.tell([`${picture.name} removed`]);
    const left = this.list.querySelectorAll('button');
    (left[Math.min(at, left.length - 1)] ?? this.button).focus();
  }

  // The pictures, which are then gone.
  take() {
    const taken = this.all;
    this.all = [];
    this.tell([]);
    this.show();
    return taken;
  }

  show() {
    this.button.hidden = !this.sees();
    this.list.hidden = !this.all.length;
    this.list.replaceChildren(...this.all.map(
        one =>
            el('li', {}, shownOf(one),
               el('button', {
                 type: 'button',
                 title: `Remove ${one.name}`,
                 'aria-label': `Remove ${one.name}`,
                 onclick: () => this.remove(one),
               },
                  '×'))));
  }
}
