// Command gen generates the C enum, the Go names and the operators' page from reasons.txt, so that they never differ.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"go/format"
	"log"
	"os"
	"strconv"
	"strings"
)

type reason struct {
	number           int
	name, side, text string
}

func main() {
	if len(os.Args) != 5 {
		log.Fatal("usage: gen reasons.txt reason.h reasons_gen.go reasons.md")
	}
	reasons, err := read(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	for i, render := range []func([]reason) ([]byte, error){header, names, page} {
		out, err := render(reasons)
		if err != nil {
			log.Fatal(err)
		}
		if err := os.WriteFile(os.Args[2+i], out, 0o644); err != nil {
			log.Fatal(err)
		}
	}
}

func read(path string) ([]reason, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []reason
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if strings.HasPrefix(lines.Text(), " ") && len(all) > 0 { // the text of the last reason goes on
			all[len(all)-1].text += " " + line
			continue
		}
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 4 {
			return nil, fmt.Errorf("%s: %q: need number, name, side and text", path, line)
		}
		n, err := strconv.Atoi(fields[0])
		if err != nil || n != len(all)+1 {
			return nil, fmt.Errorf("%s: %q: numbers go up by one; next is %d", path, line, len(all)+1)
		}
		all = append(all, reason{n, fields[1], fields[2], strings.Join(fields[3:], " ")})
	}
	return all, lines.Err()
}

const notice = "Code generated from reasons.txt; DO NOT EDIT."

func header(all []reason) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(
		&b,
		"/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */\n/* %s */\n#pragma once\n\nenum reason {\n",
		notice,
	)
	for _, r := range all {
		fmt.Fprintf(&b, "\tREASON_%s = %d,\n", strings.ToUpper(strings.ReplaceAll(r.name, "-", "_")), r.number)
	}
	fmt.Fprintf(&b, "\tREASON_COUNT = %d,\n};\n", len(all)+1)
	return b.Bytes(), nil
}

func names(all []reason) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "// %s\n\npackage dropreason\n\nconst (\n", notice)
	for _, r := range all {
		name := ""
		for _, part := range strings.Split(r.name, "-") {
			name += strings.ToUpper(part[:1]) + part[1:]
		}
		fmt.Fprintf(&b, "\t%s Reason = %d\n", name, r.number)
	}
	fmt.Fprintf(&b, ")\n\nvar reasons = [...]struct{ name, text string }{\n")
	for _, r := range all {
		fmt.Fprintf(&b, "\t%d: {%q, %q},\n", r.number, r.name, r.text)
	}
	fmt.Fprintf(&b, "}\n")
	return format.Source(b.Bytes())
}

func page(all []reason) ([]byte, error) {
	sides := map[string]string{
		"container": "from a container", "uplink": "from the fabric", "node": "from the node's own stack",
		"edge": "by an interface of the node",
		"both": "from a container, or at its destination's node",
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "<!-- %s -->\n# Drop reasons\n\n", notice)
	fmt.Fprintf(
		&b,
		"Every dropped packet has one of these reasons. `pilaster status` counts them, and\n"+
			"`pilaster monitor --type drop` shows each drop with its reason, hook and endpoint.\n"+
			"[Troubleshooting](../howto/troubleshooting.md) starts from symptoms.\n\n",
	)
	fmt.Fprintf(&b, "| reason | the packet came | meaning, and what to do |\n| --- | --- | --- |\n")
	for _, r := range all {
		side, ok := sides[r.side]
		if !ok {
			return nil, fmt.Errorf("reason %s: unknown side %q", r.name, r.side)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", r.name, side, r.text)
	}
	return b.Bytes(), nil
}
