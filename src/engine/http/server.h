#pragma once

// A small HTTP/1.1 server on Boost.Asio: one thread drives every connection, so a thousand slow
// clients cost a thousand sockets and nothing else. It knows no route and no JSON: a handler gets
// the whole request and a Responder.
//
// What a client can do to it is bounded: header and body size, time for each, idle time, bytes that
// wait for a slow reader, connections. It never promises TLS: put a proxy in front for that.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tare::engine::http {

struct Request {
  std::string method;                          // "GET"
  std::string path;                            // without the query, percent-decoding not applied
  std::string query;                           // after '?', may be empty
  std::map<std::string, std::string> headers;  // names in lower case; a repeated one joins by ", "
  std::string body;
};

// Answers one request. Thread-safe; cheap to copy by shared_ptr. Either Send once, or BeginStream,
// Write any number of times, End. After the client has gone every call does nothing.
class Responder {
 public:
  virtual ~Responder() = default;
  virtual void Send(int status, std::string_view content_type, std::string body,
                    std::map<std::string, std::string> headers = {}) = 0;
  virtual void BeginStream(std::string_view content_type) = 0;
  virtual void Write(std::string chunk) = 0;
  virtual void End() = 0;
  // Called once, on the server's thread, when the client has gone before the answer ended (closed,
  // timed out, or too slow). Set it before the first write.
  virtual void OnClose(std::function<void()> callback) = 0;
};
using ResponderPtr = std::shared_ptr<Responder>;

// Runs on the server's thread: return soon; answer then or later, from any thread. A handler that
// drops its Responder without an answer makes the server say 500.
using Handler = std::function<void(std::shared_ptr<const Request>, ResponderPtr)>;

struct ServerConfig {
  std::string host = "127.0.0.1";
  uint16_t port = 0;  // 0: any free one
  size_t max_header_bytes = 64 << 10;
  size_t max_body_bytes = 32 << 20;
  int max_connections = 4096;          // one more is answered 503 and closed
  double read_seconds = 30;            // for a whole request, once its first byte came
  double idle_seconds = 120;           // between requests
  double write_seconds = 30;           // without any progress
  size_t max_pending_bytes = 8 << 20;  // that wait for one slow reader; more closes it
};

struct ServerStats {
  int64_t connections = 0, accepted = 0, requests = 0, malformed = 0, timed_out = 0, too_slow = 0;
};

class Server {
 public:
  // kInvalidArgument for a host that is no address, kIo when the port is taken.
  static Result<std::unique_ptr<Server>> Start(const ServerConfig& config, Handler handler);
  virtual ~Server() = default;
  virtual uint16_t port() const = 0;
  virtual ServerStats stats() const = 0;
  // No new connection; those that answer get up to `seconds`; then all are closed. Idempotent.
  virtual void Stop(double seconds) = 0;
};

// "200 OK"; the phrase of an unknown code is "Unknown".
std::string_view ReasonPhrase(int status);

}  // namespace tare::engine::http
