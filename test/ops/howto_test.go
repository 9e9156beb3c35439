package ops_test

import (
	"bytes"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// howTos are pages whose commands run in one lab, in this order. where is the node, or the orchestrator, on which they
// run.
var howTos = []struct {
	page, where string
	least       int // minimum number of commands on the page
	rename      string
}{
	{"howto/tenants.md", "orchestrator", 4, ""},
	{"howto/join-token.md", "orchestrator", 3, ""},
	{"howto/mtu.md", "n1", 2, ""},
	{"howto/steering.md", "n1", 4, ""},
	{"howto/services.md", "orchestrator", 2, ""},
	{"howto/rotate-key.md", "orchestrator", 1, ""},
	{"nimitz.md", "orchestrator", 2, "grey"}, // the lab has tenant green
	{"howto/underlay-services.md", "orchestrator", 5, ""},
	{"howto/migrate.md", "orchestrator", 6, ""},
	{"howto/backup.md", "orchestrator", 2, ""},
	{"howto/several-orchestrators.md", "orchestrator", 2, ""}, // the commands are those of the embedded etcd
}

// elsewhere are commands of these pages that run in another place, and this place.
var elsewhere = map[string]string{"pilaster status | grep gateway": "n1"}

// varying are parts of outputs that differ between runs, and their replacements in a comparison.
var varying = []struct {
	part *regexp.Regexp
	by   string
}{
	{regexp.MustCompile(`pilaster\.[0-9a-f]{32}\.[0-9a-f]{64}`), "TOKEN"},
	{regexp.MustCompile(`pilaster\.<32 hexadecimal digits>\.<64 hexadecimal digits>`), "TOKEN"},
	{regexp.MustCompile(`[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}`), "UUID"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT[0-9:.]+Z`), "TIME"},
	{regexp.MustCompile(`[0-9a-f]*(?::[0-9a-f]*){2,}(?:/\d+)?`), "ADDRESS"},
	{regexp.MustCompile(`\d[\d,]*`), "NUMBER"},
}

// likeness returns a text without varying parts, and with single spaces.
func likeness(text string) string {
	for _, v := range varying {
		text = v.part.ReplaceAllString(text, v.by)
	}
	var lines []string
	for line := range strings.Lines(text) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return strings.Join(lines, "\n")
}

// howToSteps reads the commands after "$ " in all code blocks of a page, up to the section "Try it in a lab".
func howToSteps(t *testing.T, page string) (steps []step) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../../docs", page))
	must(t, err)
	text, _, _ := strings.Cut(string(b), "\n## Try it in a lab\n")
	for _, block := range regexp.MustCompile("(?ms)^ *```(\\w*)\n(.*?)^ *```$").FindAllStringSubmatch(text, -1) {
		if block[1] != "" { // files, and outputs of other places
			continue
		}
		for line := range strings.Lines(block[2]) {
			if command, typed := strings.CutPrefix(strings.TrimLeft(line, " "), "$ "); typed {
				steps = append(steps, step{command: strings.TrimSpace(command)})
			} else if len(steps) > 0 && strings.HasPrefix(strings.TrimLeft(block[2], " "), "$ ") {
				steps[len(steps)-1].shown += line
			}
		}
	}
	return steps
}

// TestHowTo runs the commands of pages in docs/ in a lab, and compares their output with the pages, except numbers,
// addresses and times.
func TestHowTo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	ctx := labtest.Context(t)
	name := labtest.Name(t)
	cidrs := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd12:3456::/48")}
	spec := lab.Spec{
		Name: name, Nodes: []string{"n1", "n2"}, Device: endpoint.Veth, // macvlans do not support network nimitz
		Tenants: []lab.Tenant{{Name: "blue"}, {Name: "green", Network: "nimitz", CIDRs: cidrs}},
		Containers: []lab.Container{
			{Name: "b1", Node: "n1", Tenant: "blue"}, {Name: "b2", Node: "n2", Tenant: "blue"},
			{Name: "g1", Node: "n1", Tenant: "green"}, {Name: "g2", Node: "n2", Tenant: "green"},
		},
	}
	spec.EVPN = "10.71.0.0/16" // tenant green moves to network evpn
	labtest.New(t, spec)
	dir, dataDir := t.TempDir(), "/var/lib/pilaster/orchestrator"
	for _, h := range howTos {
		ran := 0
		for _, s := range howToSteps(t, h.page) {
			if !strings.HasPrefix(s.command, "pilaster ") { // systemctl, mv
				continue
			}
			ran++
			command := strings.NewReplacer("/backup/", dir+"/", dataDir, dir+"/restored").Replace(s.command)
			shown := s.shown
			if h.rename != "" {
				command = strings.ReplaceAll(command, "green", h.rename)
				shown = strings.ReplaceAll(shown, "green", h.rename)
			}
			where := h.where
			if node, ok := elsewhere[s.command]; ok {
				where = node
			}
			var out, complaint bytes.Buffer
			cmd := exec.CommandContext(ctx, labtest.Binary(t),
				"lab", "exec", "--lab", name, where, "--", "bash", "-ec", command)
			cmd.Stdout, cmd.Stderr = &out, &complaint
			if err := cmd.Run(); err != nil {
				t.Errorf("%s: $ %s\n%v: %s%s", h.page, command, err, &out, &complaint)
				continue
			}
			got := strings.NewReplacer(dir+"/restored", dataDir, dir+"/", "/backup/").Replace(out.String())
			want := regexp.QuoteMeta(likeness(shown))
			want = regexp.MustCompile(`(?m)^…$`).ReplaceAllString(want, `(?s:.*)`)
			want = strings.ReplaceAll(want, "…", ".*")
			if shown != "" && !regexp.MustCompile("^"+want+"$").MatchString(likeness(got)) {
				t.Errorf("%s: $ %s\n%s\nwant, by the page,\n%s", h.page, command, likeness(got), likeness(shown))
			}
		}
		if ran < h.least {
			t.Errorf("%s has only %d commands, want more", h.page, ran)
		}
	}
}
