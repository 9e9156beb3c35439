// Package api has the protobuf services of Pilaster's programs. They use Connect: gRPC and JSON on one port. The
// generated Go is committed; `make generate` updates it.
package api

//go:generate sh -c "protoc -I. --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --plugin=protoc-gen-connect-go=$(go tool -n protoc-gen-connect-go) --go_out=. --go_opt=paths=source_relative --connect-go_out=. --connect-go_opt=paths=source_relative pilaster/v1/cluster.proto pilaster/v1/service.proto pilaster/v1/orchestrator.proto pilaster/v1/agent.proto"
