package evpn_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
)

// howTo is the page about FRR. Its commands and configurations make the tests' routers.
type howTo struct {
	t      *testing.T
	blocks []string
}

func readHowTo(t *testing.T) howTo {
	t.Helper()
	text, err := os.ReadFile("../../docs/howto/frr.md")
	must(t, err)
	h := howTo{t: t}
	for _, block := range regexp.MustCompile("(?ms)^```\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		h.blocks = append(h.blocks, block[1])
	}
	return h
}

// block returns the block that begins with some words.
func (h howTo) block(words string) string {
	h.t.Helper()
	for _, b := range h.blocks {
		if strings.HasPrefix(b, words) {
			return b
		}
	}
	h.t.Fatalf("the page has no block that begins with %q", words)
	return ""
}

// run runs the commands of a block in a namespace.
func (h howTo) run(ns *netns.Namespace, words string) {
	h.t.Helper()
	var out strings.Builder
	cmd := exec.Command("bash", "-exc", h.block(words))
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := ns.Run(cmd); err != nil {
		h.t.Fatalf("%v: %s", err, &out)
	}
}

// withPeers replaces the orchestrator in a configuration of FRR by peers of an AS, to which FRR connects each second.
func withPeers(config string, asn int, peers ...string) string {
	var b strings.Builder
	for line := range strings.Lines(config) {
		if !strings.Contains(line, "neighbor "+orchestratorAt+" ") {
			b.WriteString(line)
			continue
		}
		if asn == frrASN && strings.Contains(line, "ebgp-multihop") {
			continue
		}
		for _, p := range peers {
			line := strings.Replace(line, orchestratorAt, p, 1)
			if strings.Contains(line, "remote-as") {
				line = fmt.Sprintf(" neighbor %s remote-as %d\n neighbor %s timers connect 1\n", p, asn, p)
			}
			b.WriteString(line)
		}
	}
	return b.String()
}

// followed runs the commands of the page that check the exchange, and compares their output with the page's lines.
func (b bed) followed(n *frrNode) {
	ran := 0
	for _, block := range readHowTo(b.T).blocks {
		var run func() string
		for line := range strings.Lines(block) {
			if command, typed := strings.CutPrefix(line, "$ "); typed {
				run = b.command(n, strings.TrimSpace(command))
				ran++
			} else if run != nil {
				want := strings.Join(strings.Fields(line), " ")
				is := regexp.MustCompile("(?m)^" + strings.ReplaceAll(regexp.QuoteMeta(want), "…", ".*") + "$")
				out := ""
				b.Cleanup(func() {
					if b.Failed() && !is.MatchString(out) {
						b.Logf("without the line %q:\n%s", want, out)
					}
				})
				until(b.T, fmt.Sprintf("the line %q", want), func() bool { out = run(); return is.MatchString(out) })
			}
		}
	}
	if ran < 6 {
		b.Errorf("the page has only %d commands to check the exchange", ran)
	}
}

// command returns a function that runs a command of the page, and returns its output with single spaces.
func (b bed) command(n *frrNode, command string) func() string {
	b.Helper()
	run := func() string {
		socket := filepath.Join(b.Folder(), "orchestrator", "run", "orchestrator.sock")
		out, err := exec.Command("bash", "-ec", strings.Replace(command, "pilaster", labtest.Binary(b.T), 1)+
			" --orchestrator-socket "+socket).CombinedOutput()
		if err != nil {
			b.Fatalf("$ %s\n%v: %s", command, err, out)
		}
		return string(out)
	}
	if quoted, ok := strings.CutPrefix(command, "vtysh -c '"); ok {
		run = func() string { return n.Run(strings.TrimSuffix(quoted, "'")) }
	}
	return func() string {
		var lines []string
		for line := range strings.Lines(run()) {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
		return strings.Join(lines, "\n")
	}
}
