package cli

import (
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator"
)

func TestTokenCommands(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", orchestrator.Socket(dir))
	refused(t, ExitUnreachable, orchestrator.Socket(dir), "orchestrator", "token", "rotate")
	s, err := orchestrator.Start(t.Context(), orchestrator.Config{
		DataDir: filepath.Join(dir, "data"), RunDir: dir, Listen: "[::1]:0", Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	refused(t, ExitUsage, "unknown command", "orchestrator", "token", "nonsense")
	refused(t, ExitUsage, "wrong number of arguments", "orchestrator", "token", "rotate", "now")

	var shown []string
	for range 2 {
		r := command(t, "orchestrator", "token", "show")
		if r.stdout != s.Token()+"\n" {
			t.Errorf("shown %+v, want %s", r, s.Token())
		}
		if _, err := join.ParseToken(r.stdout); err != nil {
			t.Error(err)
		}
		shown = append(shown, r.stdout, command(t, "orchestrator", "token", "rotate").stdout)
	}
	if shown[1] != shown[2] || len(slices.Compact(slices.Clone(shown))) != 3 {
		t.Errorf("show, rotate, show, rotate: %q, want the third to equal the second", shown)
	}
	if v := ask[tokenView](t, "orchestrator", "token", "show"); v.Token+"\n" != shown[3] {
		t.Errorf("token show: %+v, want %s", v, shown[3])
	}
	if v := ask[tokenView](t, "orchestrator", "token", "rotate"); v.Token != s.Token() || v.Token+"\n" == shown[3] {
		t.Errorf("token rotate: %+v, want the new token %s", v, s.Token())
	}
	if r := command(t, "__complete", "orchestrator", "token", ""); !strings.Contains(r.stdout, "show") ||
		!strings.Contains(r.stdout, "rotate") {
		t.Errorf("token <TAB>: %+v, want show and rotate", r)
	}
}
