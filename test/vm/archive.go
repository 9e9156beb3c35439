package main

import (
	"encoding/json"
	"fmt"
	"io"
	"path"
	"strings"
)

// archive writes an initramfs in cpio's "newc" format.
type archive struct {
	w      io.Writer
	inodes int
	err    error // of the first failed write
}

func (a *archive) folder(name string) { a.entry(name, 0o40755, nil) }

func (a *archive) file(name string, data []byte) { a.entry(name, 0o100755, data) }

func (a *archive) json(name string, v any) {
	data, err := json.Marshal(v)
	if a.err == nil {
		a.err = err
	}
	a.file(name, data)
}

func (a *archive) end() { a.entry("TRAILER!!!", 0, nil) }

func (a *archive) entry(name string, mode int, data []byte) {
	a.inodes++
	header := "070701"
	// inode, mode, owner, group, links, time, size, device, device of a node, length of the name, sum
	for _, v := range []int{a.inodes, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0} {
		header += fmt.Sprintf("%08x", v)
	}
	a.write([]byte(header + name + "\x00"))
	a.write(data)
}

// write writes data, padded to a multiple of four bytes.
func (a *archive) write(data []byte) {
	if a.err == nil {
		_, a.err = a.w.Write(data)
	}
	if pad := -len(data) & 3; a.err == nil && pad > 0 {
		_, a.err = a.w.Write(make([]byte, pad))
	}
}

// loadOrder returns the files of the named modules and of their dependencies, dependencies first. index is the content
// of modules.dep. A module that modules.dep does not list is built into the kernel.
func loadOrder(index []byte, wanted ...string) (files []string) {
	needs, named := map[string][]string{}, map[string]string{}
	for line := range strings.Lines(string(index)) {
		file, needed, found := strings.Cut(line, ":")
		if !found {
			continue
		}
		needs[file] = strings.Fields(needed)
		name, _, _ := strings.Cut(path.Base(file), ".ko")
		named[strings.ReplaceAll(name, "-", "_")] = file
	}
	done := map[string]bool{"": true}
	var add func(file string)
	add = func(file string) {
		if done[file] {
			return
		}
		done[file] = true
		for _, n := range needs[file] {
			add(n)
		}
		files = append(files, file)
	}
	for _, w := range wanted {
		add(named[w])
	}
	return files
}
