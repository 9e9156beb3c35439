package rules

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// legacyFamily is iptables-legacy of IPv4 or IPv6.
type legacyFamily struct{ tables, command string }

var legacyFamilies = []legacyFamily{
	{"/proc/thread-self/net/ip_tables_names", "iptables-legacy-save"},
	{"/proc/thread-self/net/ip6_tables_names", "ip6tables-legacy-save"},
}

// read returns no error if the namespace has no tables of this family. The kernel shows these rules to the program
// that made them only, in a binary form that depends on its version.
func (f legacyFamily) read(ctx context.Context, marks uint32) (Report, error) {
	names, err := os.ReadFile(f.tables)
	if err != nil && !errors.Is(err, os.ErrNotExist) { // without the file, the kernel has no such tables
		return Report{}, err
	}
	if len(bytes.TrimSpace(names)) == 0 {
		return Report{}, nil
	}
	var complaint bytes.Buffer
	save := exec.CommandContext(ctx, f.command)
	save.Stderr = &complaint
	out, err := save.Output()
	if errors.Is(err, exec.ErrNotFound) {
		return Report{}, fmt.Errorf("%s lists tables, and %s is not installed: install the package iptables", f.tables,
			f.command)
	} else if err != nil {
		return Report{}, fmt.Errorf("%s: %w: %s", f.command, err, bytes.TrimSpace(complaint.Bytes()))
	}
	return parseLegacy(strings.TrimSuffix(f.command, "-save"), string(out), marks), nil
}

// parseLegacy judges the rules in the output of iptables-legacy-save.
func parseLegacy(program, saved string, marks uint32) (r Report) {
	var table string
	chains := map[string]bool{}
	numbers := map[string]int{}
	for line := range strings.Lines(saved) {
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
			clear(chains)
			clear(numbers)
		case strings.HasPrefix(line, ":"):
			chains[strings.Fields(line[1:])[0]] = true
		case strings.HasPrefix(line, "-A "):
			matches, target, seen, saved := legacyRule(line)
			chain := strings.Fields(line)[1]
			numbers[chain]++
			r.Tracks = r.Tracks || slices.Contains(trackingTargets, target) ||
				slices.ContainsFunc(matches, func(m string) bool { return slices.Contains(trackingMatches, m) })
			if table == "nat" || target == "" || slices.Contains(passiveTargets, target) {
				continue
			}
			why := unsafeLegacy(matches, target, chains)
			if why == "" && seen&marks != 0 {
				why = whyMark(marks)
			}
			if why == "" && saved&marks != 0 {
				why = whySaved(marks)
			}
			if why != "" {
				r.Unsafe = append(r.Unsafe,
					fmt.Sprintf("%s table %s, chain %s, rule %d: %s", program, table, chain, numbers[chain], why))
			}
		}
	}
	return r
}

func unsafeLegacy(matches []string, target string, chains map[string]bool) string {
	for _, m := range matches {
		if !safeMatch(m) {
			return m
		}
	}
	if !safeTarget(target) && !chains[target] {
		return "target " + target
	}
	return ""
}

// legacyRule returns the matches and the target of a rule, the bits of marks that it looks at, and those that it copies
// to or from conntrack's. Comments and strings in quotes may contain anything.
func legacyRule(line string) (matches []string, target string, marks, saved uint32) {
	words := splitQuoted(line)
	for i := 0; i+1 < len(words); i++ {
		switch words[i] {
		case "-m":
			matches = append(matches, words[i+1])
		case "-j", "-g":
			if target = words[i+1]; target == "CONNMARK" {
				saved = legacyConnmarkBits(words[i+1:])
			}
		case "--mark":
			if len(matches) > 0 && matches[len(matches)-1] == "mark" { // connmark has this option too
				marks |= legacyMarkMask(words[i+1])
			}
		default:
			continue
		}
		i++
	}
	return matches, target, marks, saved
}

// splitQuoted splits at blanks outside of quotes. A quoted word keeps its first quote, so that it is no option.
func splitQuoted(line string) (words []string) {
	var word strings.Builder
	quoted := false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '\\' && quoted && i+1 < len(line):
			i++
			word.WriteByte(line[i])
		case c == '"':
			if quoted = !quoted; quoted {
				word.WriteByte(c)
			}
		case c == ' ' && !quoted:
			if word.Len() > 0 {
				words = append(words, word.String())
				word.Reset()
			}
		default:
			word.WriteByte(c)
		}
	}
	if word.Len() > 0 {
		words = append(words, word.String())
	}
	return words
}
