package cli

import (
	"fmt"
	"net/http"
	"testing"
)

func TestMetrics(t *testing.T) {
	serving := func(text string) string {
		mux := http.NewServeMux()
		mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, text) })
		return serveMux(t, mux)
	}
	t.Setenv("PILASTER_AGENT_SOCKET", serving("of_the_agent 1"))
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", serving("of_the_orchestrator 1"))
	refused(t, ExitUnreachable, "`pilaster metrics orchestrator`", "metrics", "--agent-socket",
		"/nonexistent/agent.sock")
	for _, c := range []struct {
		args []string
		want string
		exit int
	}{
		{[]string{"metrics"}, "of_the_agent 1\n", ExitDone},
		{[]string{"metrics", "agent"}, "of_the_agent 1\n", ExitDone},
		{[]string{"metrics", "orchestrator"}, "of_the_orchestrator 1\n", ExitDone},
		{[]string{"metrics", "node"}, "", ExitUsage},
		{[]string{"metrics", "--agent-socket", "/nonexistent/agent.sock"}, "", ExitUnreachable},
		{[]string{"metrics", "--agent-socket", serveMux(t, http.NewServeMux())}, "", ExitFailed},
	} {
		if exit, stdout, stderr := run(t, "", c.args...); exit != c.exit || stdout != c.want {
			t.Errorf("%v: exit %d, %q, %q; want exit %d, %q", c.args, exit, stdout, stderr, c.exit, c.want)
		}
	}
}
