package api

import (
	"net/http"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/unixrpc"
)

// The agent ignores unknown fields of a later plugin or command, and refuses unknown calls.
func TestLaterPluginsAreAnswered(t *testing.T) {
	b := newServiceBed(t)
	b.service.Serve(b.Core, func() error { return nil })
	add := agenttest.Later(
		&pilasterv1.AddEndpointRequest{
			ContainerId: "c1",
			Interface:   "eth0",
			Netns:       b.netns,
			Tenant:      "blue",
			Labels:      map[string]string{"app": "web"},
		},
	)
	if _, err := b.client.AddEndpoint(t.Context(), connect.NewRequest(add)); err != nil {
		t.Errorf("ADD: %v", err)
	}
	del := agenttest.Later(&pilasterv1.DeleteEndpointRequest{ContainerId: "c1", Interface: "eth0"})
	if _, err := b.client.DeleteEndpoint(t.Context(), connect.NewRequest(del)); err != nil {
		t.Errorf("DEL: %v", err)
	}
	client := unixrpc.Client(b.socket)
	defer client.CloseIdleConnections()
	said, err := client.Post(unixrpc.URL+"/pilaster.v1.AgentService/Later", "application/proto", nil)
	if err != nil {
		t.Fatal(err)
	}
	said.Body.Close()
	if said.StatusCode != http.StatusNotFound {
		t.Errorf("an unknown method: %s", said.Status)
	}
}
