package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
)

// legible replaces the escape sequences of a coloured text.
var legible = strings.NewReplacer(
	fieldColours["node"], "<n>", fieldColours["tenant"], "<t>", fieldColours["app"], "<a>",
	fieldColours["index"], "<i>", uncoloured, "<>",
)

func TestColourFields(t *testing.T) {
	for addr, want := range map[string]string{
		"fd70:696c:6100:2:0:100:300:2a":        "<n>fd70:696c:6100:2:<t>0:1<a>00:3<i>00:2a<>",
		"fd70:696c:6100:2:1234:5678:9abc:def0": "<n>fd70:696c:6100:2:<t>1234:56<a>78:9a<i>bc:def0<>",
		"fd70:696c:6100:2:0:ff:0:1":            "<n>fd70:696c:6100:2:<t>0:<a>ff:<i>0:1<>",
		"fd70:696c:6100:2::1":                  "<n>fd70:696c:6100:2::<i>1<>",
		"2001:db8::1:0:100:300:2a":             "<n>2001:db8::1:<t>0:1<a>00:3<i>00:2a<>",
		"2001:db8::":                           "<n>2001:db8::<>",
		"::1":                                  "::<i>1<>",
	} {
		if got := legible.Replace(colourFields(addr)); got != want {
			t.Errorf("%s: %s, want %s", addr, got, want)
		}
	}
}

func TestExplainColoured(t *testing.T) {
	const plaintext = "fd70:696c:6100:3:0:100:300:13"
	for addr, want := range map[string]string{
		plaintext: `
<n>fd70:696c:6100:3:<t>0:1<a>00:3<i>00:13<>
  base     fd70:696c:6100::/40
<n>  node     3<>   fd70:696c:6100:3::/64   routed by the fabric
<t>  tenant   1<>   not hosted on this node
<a>  app      3<>   unknown on this node
<i>  index    19<>
`,
		"2001:db8::1": `
2001:db8::1
  foreign   in neither fd70:696c:6100::/40 (nodes) nor fc00::/8 (containers), ` +
			`and no tenant of network nimitz or evpn on this node has it in its CIDRs
  exposed   unknown: no orchestrator answers on this machine; pilaster service list on one shows exposed ports
`,
	} {
		a, err := address.Parse(addr)
		if err != nil {
			t.Fatal(err)
		}
		e := explain(address.DefaultPlan(), a, nil)
		var out output
		var text bytes.Buffer
		if err := out.print(&text, e, e.text); err != nil {
			t.Fatal(err)
		}
		if got := "\n" + legible.Replace(e.coloured(text.String())); got != want {
			t.Errorf("%s\nwant%s", got, want)
		}
	}
}

// TestColoursOnTerminalsOnly: a pipe or a file gets no escape sequences, nor does the terminal of a user who refuses
// them.
func TestColoursOnTerminalsOnly(t *testing.T) {
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "xterm")
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if !colours(terminal) || colours(file) || colours(&bytes.Buffer{}) {
		t.Errorf("terminal %v, file %v, buffer %v; want colours on the terminal only",
			colours(terminal), colours(file), colours(&bytes.Buffer{}))
	}
	for name, value := range map[string]string{"NO_COLOR": "1", "TERM": "dumb"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, value)
			if colours(terminal) {
				t.Errorf("colours with %s=%s", name, value)
			}
		})
	}
}
