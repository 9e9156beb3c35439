package main

import (
	"fmt"
	"go/scanner"
	"go/token"
	"strings"
)

// maxTwice is the maximum length of duplicate code, in lines of code, outside of tests.
const maxTwice = 12

// codeLine is a line of code without comments and indentation.
type codeLine struct {
	line int
	text string
}

// block is duplicate code. It has the two locations and the length in lines of code.
type block struct {
	file, other string
	line, at    int
	lines       int
	longest     string // line of code, to identify the block
}

// checkDuplicates finds duplicate code in the given files.
func checkDuplicates(files []file) (found []finding) {
	for _, b := range duplicates(files) {
		if !isKnown(b) {
			found = append(found, finding{b.file, b.line, "duplicate",
				fmt.Sprintf("%d lines of code stand in %s:%d too: %s", b.lines, b.other, b.at, b.longest)})
		}
	}
	return found
}

// duplicates returns the longest blocks of more than maxTwice lines that occur twice in Go or C outside of tests. Blank
// lines, comments, imports and whitespace do not count.
func duplicates(files []file) (blocks []block) {
	type place struct{ file, line int }
	var codes [][]codeLine
	var paths []string
	for _, f := range files {
		if code := codeOf(f); len(code) > maxTwice && !f.isTest() {
			codes, paths = append(codes, code), append(paths, f.path)
		}
	}
	seen := map[string][]place{} // by maxTwice+1 lines
	for i, code := range codes {
		ends := map[place]int{} // of the block last found, by the file and the distance of the lines
		for j := range len(code) - maxTwice {
			key := window(code[j:])
			for _, p := range seen[key] {
				if p.file == i && p.line+maxTwice >= j { // the block would overlap itself
					continue
				}
				distance := place{p.file, p.line - j}
				if ends[distance] > j { // part of the block found before
					continue
				}
				n := maxTwice + 1
				other := codes[p.file]
				for j+n < len(code) && p.line+n < len(other) && code[j+n].text == other[p.line+n].text &&
					(p.file != i || p.line+n < j) {
					n++
				}
				ends[distance] = j + n
				blocks = append(blocks, block{
					file: paths[i], other: paths[p.file], line: code[j].line, at: other[p.line].line,
					lines: n, longest: longest(code[j : j+n]),
				})
			}
			seen[key] = append(seen[key], place{i, j})
		}
	}
	return blocks
}

func window(code []codeLine) string {
	var b strings.Builder
	for _, l := range code[:maxTwice+1] {
		b.WriteString(l.text)
		b.WriteByte('\n')
	}
	return b.String()
}

// codeOf returns nil for languages whose code is not compared.
func codeOf(f file) []codeLine {
	switch f.language {
	case golang:
		return goCode(f)
	case clang:
		return cCode(f)
	}
	return nil
}

func goCode(f file) (code []codeLine) {
	set := token.NewFileSet()
	source := set.AddFile(f.path, -1, len(f.text))
	var s scanner.Scanner
	s.Init(source, f.text, func(token.Position, string) {}, 0)
	imports := false
	for {
		pos, tok, literal := s.Scan()
		if tok == token.EOF {
			return code
		}
		line := source.Line(pos)
		if tok == token.IMPORT {
			imports = true
		} else if imports && (tok == token.FUNC || tok == token.TYPE || tok == token.VAR || tok == token.CONST) {
			imports = false
		}
		if imports || tok == token.SEMICOLON && literal == "\n" {
			continue
		}
		if literal == "" {
			literal = tok.String()
		}
		if last := len(code) - 1; last >= 0 && code[last].line == line {
			code[last].text += " " + literal
		} else {
			code = append(code, codeLine{line, literal})
		}
	}
}

func cCode(f file) (code []codeLine) {
	blanked, _ := splitC(string(f.text))
	lines := f.lines()
	for i, line := range strings.Split(blanked, "\n") {
		if strings.TrimSpace(line) == "" {
			continue
		}
		if strings.Contains(lines[i], `"`) {
			line = lines[i] // strings differ
		}
		code = append(code, codeLine{i + 1, strings.Join(strings.Fields(line), " ")})
	}
	return code
}

func longest(code []codeLine) (text string) {
	for _, l := range code {
		if len(l.text) > len(text) {
			text = l.text
		}
	}
	return text
}

// known are accepted duplicates, by their longest line of code, with a reason. The list may only shrink.
var known = map[string]string{}

func isKnown(b block) bool { return known[b.longest] != "" }
