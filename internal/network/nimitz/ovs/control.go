package ovs

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const daemonName = "ovs-vswitchd"

// refusal is the error text of ovs-vswitchd for a command that it rejects.
type refusal string

func (r refusal) Error() string { return string(r) }

// control sends a command to ovs-vswitchd, as ovs-appctl does.
func (s *Switch) control(ctx context.Context, method string, args ...string) (string, error) {
	answer, err := ask(ctx, s.config.RunDir, method, args...)
	if err != nil {
		return "", fmt.Errorf("%s: %s %s: %w", daemonName, method, strings.Join(args, " "), err)
	}
	return answer, nil
}

// daemon returns the PID of ovs-vswitchd, which changes with each start.
func daemon(runDir string) (string, error) {
	pid, err := os.ReadFile(filepath.Join(runDir, daemonName+".pid"))
	return strings.TrimSpace(string(pid)), err
}

func controlSocket(runDir, pid string) string {
	return filepath.Join(runDir, fmt.Sprintf("%s.%s.ctl", daemonName, pid))
}

func ask(ctx context.Context, runDir, method string, args ...string) (string, error) {
	pid, err := daemon(runDir)
	if err != nil {
		return "", err
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", controlSocket(runDir, pid))
	if err != nil {
		return "", err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	request := struct {
		ID     int      `json:"id"`
		Method string   `json:"method"`
		Params []string `json:"params"`
	}{0, method, append([]string{}, args...)}
	if err := json.NewEncoder(conn).Encode(request); err != nil {
		return "", err
	}
	var reply struct {
		Result string   `json:"result"`
		Error  *refusal `json:"error"`
	}
	if err := json.NewDecoder(conn).Decode(&reply); err != nil {
		return "", err
	}
	if reply.Error != nil {
		return "", *reply.Error
	}
	return reply.Result, nil
}
